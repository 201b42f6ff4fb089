"""Runs that are followed for who looks at them: panels that are worked out again when something has come, no more
often than a small share of a core allows, each with the number of its last change."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from unisono.report.analyse import Analysis, analyse
from unisono.report.verdict.evidence import Prices
from unisono.report.verdict.judge import RunVerdict, no_price
from unisono.spec.settings import tell
from unisono_contrib.report.compare import names_of
from unisono_contrib.report.dash import beside, panels
from unisono_contrib.report.dash.follow import FollowedRun
from unisono_contrib.report.dash.heat import heat
from unisono_contrib.report.dash.panels import Panel

_SHARE = 0.003  # of a core, that working out panels of one kind may take
_LEAST = 1.0  # seconds between two times
_LOOK = 0.5  # seconds between two looks at the folders
_CLOCK = 20.0  # seconds after which panels are worked out though nothing has come: how long ago things were


NOTHING = Analysis((), None, RunVerdict("", False, "Nothing has been measured yet."))


class LiveRuns:
    """Follows run folders in a thread of its own, from `start` until `stop`.

    boot: a word for this process, since numbers of changes begin anew with each. prices: of changes, for each run.
    whatif: for each run what may be asked of its planner, None for nothing.
    """

    def __init__(self, folders: Sequence[Path], prices: Sequence[Prices] = ()) -> None:
        names = names_of([folder.resolve() for folder in folders]) if len(folders) > 1 else [folders[0].name]
        self.runs = [FollowedRun(folder, name) for folder, name in zip(folders, names, strict=True)]
        self._prices = [*prices] or [no_price] * len(folders)
        self.whatif: list[Panel | None] = [None] * len(folders)
        self._step_s: dict[int, float] = {}
        self._facts = [NOTHING] * len(folders)
        self.boot, self.number = secrets.token_hex(4), 0
        self._texts: dict[tuple[int, str], tuple[int, str]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="unisono-dash", daemon=True)

    def start(self) -> None:
        """Read what there is of the present, then follow."""
        for run in self.runs:
            run.turn()
        self._draw_verdicts()
        self._draw_figures()
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._over.set()
        self._thread.join(10.0)

    def changes(self, since: int = 0) -> tuple[int, str]:
        """(the number of the last change, all panels that changed after `since`, as a JSON list)."""
        with self._lock:
            texts = [text for number, text in self._texts.values() if number > since]
            return self.number, f"[{','.join(texts)}]"

    def step_s(self, run: int) -> float | None:
        """Seconds of a mean step as measured; None before there is one."""
        return self._step_s.get(run)

    def _work(self) -> None:
        paces = [_Pace(self._draw_figures), _Pace(self._draw_verdicts)]
        while not self._over.is_set():
            busy = False
            for run in self.runs:
                try:
                    run.turn()
                except OSError as error:  # a file system that is away for a while
                    tell(f"note  {run.folder}: {error.strerror or error}")
                busy = busy or not run.is_caught_up
            for pace in paces:
                pace.turn(sum(run.version for run in self.runs))
            self._over.wait(0.001 if busy else _LOOK)

    def _draw_figures(self) -> None:
        """What changes with each step and is quickly worked out."""
        for at, run in enumerate(self.runs):
            record = run.record()
            name = run.name if len(self.runs) > 1 else ""
            self._put(at, panels.figures(record, self._facts[at], run.latest_at, name))
            self._put(at, [_heat(run), _logs(run), _checkpoints(run)])

    def _draw_verdicts(self) -> None:
        """What looks at the latest steps of all ranks, and at other runs."""
        records = [run.record() for run in self.runs]
        for at, record in enumerate(records):
            self._facts[at] = facts = analyse(record, self._prices[at])
            if facts.shares:
                self._step_s[at] = fmean(share.wall for share in facts.shares)
            self._put(at, panels.means(record, facts))
            if (choices := self.whatif[at]) is not None:
                self._put(at, [_WHATIF | choices])
        if len(self.runs) > 1:
            self._put(-1, beside.panels([run.name for run in self.runs], records))

    def _put(self, run: int, drawn: Sequence[Panel]) -> None:
        with self._lock:
            for panel in drawn:
                text = json.dumps({"run": run, **panel}, separators=(",", ":"), allow_nan=False, default=str)
                if self._texts.get((run, panel["id"]), (0, ""))[1] != text:
                    self.number += 1
                    self._texts[run, panel["id"]] = (self.number, text)


class _Pace:
    """Does a work when something has come, and so seldom that it takes `_SHARE` of a core at most."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._seen, self._due, self._done = work, -1, 0.0, time.monotonic()

    def turn(self, version: int) -> None:
        """version: another number where something has come."""
        now = time.monotonic()
        if now < self._due or (version == self._seen and now < self._done + _CLOCK):
            return
        begun = time.thread_time()
        self._work()
        self._seen, self._done = version, now
        self._due = now + max(_LEAST, (time.thread_time() - begun) / _SHARE)


_WHATIF: Panel = {
    "id": "whatif",
    "kind": "whatif",
    "title": "What if: the planner's price of other ranks, links and batches",
    "half": False,
}


def _heat(run: FollowedRun) -> Panel:
    with run.lock:
        return heat(run.late, run.every, run.is_caught_up)


def _logs(run: FollowedRun) -> Panel:
    with run.lock:
        return {
            "id": "logs",
            "kind": "logs",
            "title": "Logs of all ranks",
            "count": run.log_count,
            "half": False,
        }


def _checkpoints(run: FollowedRun) -> Panel:
    rows = [[str(step), _clock_time(at), size] for step, at, size in run.checkpoints()]
    table = {"heads": ["step", "saved at", "size"], "rows": rows, "numeric": 1, "open": True}
    note = "" if rows else "None yet."
    return {
        "id": "checkpoints", "kind": "bars", "title": "Checkpoints", "charts": [], "table": table, "note": note,
        "half": True,
    }  # fmt: skip


def _clock_time(at: float) -> str:
    """`27 Nov 23:41:02`, in the time of this host."""
    return time.strftime("%d %b %H:%M:%S", time.localtime(at))
