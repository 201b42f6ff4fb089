"""Runs that are followed for who looks at them: panels that are worked out again when something has come, each with
the number of its last change. Who works them out takes a small share of a core at every moment: of many ranks a verdict
is worked out with rests between them, over some minutes."""

import gc
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Self

from unisono.report.analyse import Analysis, analyse
from unisono.report.collect import RankFacts
from unisono.report.verdict.evidence import Prices
from unisono.report.verdict.judge import RunVerdict, no_price
from unisono.spec.settings import tell
from unisono_contrib.report.compare import names_of
from unisono_contrib.report.dash import beside, panels
from unisono_contrib.report.dash.follow import FollowedRun
from unisono_contrib.report.dash.heat import heat
from unisono_contrib.report.dash.panels import Panel

_SHARE = 0.003  # of a core, that working out panels of one kind may take
_SLICE = 0.02  # seconds of a core after which that is held to; shorter works end without a rest
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
        self._facts, self._judged_at = [NOTHING] * len(folders), [0.0] * len(folders)
        self.boot, self.number = secrets.token_hex(4), 0
        self._texts: dict[tuple[int, str], tuple[int, str]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._pace = _Pace(self._draw_verdicts, self._over)
        self._threads = [
            threading.Thread(target=work, name=f"unisono-dash-{work.__name__.strip('_')}", daemon=True)
            for work in (self._follow, self._judge)
        ]

    def start(self) -> None:
        """Read what there is of the present, then follow."""
        for run in self.runs:
            run.turn()
        self._draw_verdicts()
        self._draw_figures()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when the threads have ended."""
        self._over.set()
        for thread in self._threads:
            thread.join(10.0)

    def changes(self, since: int = 0) -> tuple[int, str]:
        """(the number of the last change, all panels that changed after `since`, as a JSON list)."""
        with self._lock:
            texts = [text for number, text in self._texts.values() if number > since]
            return self.number, f"[{','.join(texts)}]"

    def step_s(self, run: int) -> float | None:
        """Seconds of a mean step as measured; None before there is one."""
        return self._step_s.get(run)

    @property
    def _version(self) -> int:
        return sum(run.version for run in self.runs)

    def _follow(self) -> None:
        pace, is_old = _Pace(self._draw_figures, self._over), False
        while not self._over.is_set():
            busy = False
            for run in self.runs:
                try:
                    run.turn()
                except OSError as error:  # a file system that is away for a while
                    tell(f"note  {run.folder}: {error.strerror or error}")
                busy = busy or not run.is_caught_up
            pace.turn(self._version)
            if (
                not busy and not is_old
            ):  # what is known of the past stays: the collector need not go through it again
                gc.collect()
                gc.freeze()
                is_old = True
            self._over.wait(0.001 if busy else _LOOK)

    def _judge(self) -> None:
        while not self._over.wait(_LOOK):
            self._pace.turn(self._version)

    def _draw_figures(self) -> None:
        """What changes with each step and is quickly worked out."""
        for at, run in enumerate(self.runs):
            record = run.record()
            name = run.name if len(self.runs) > 1 else ""
            self._put(at, panels.figures(record, self._facts[at], run.latest_at, name, self._judged_at[at]))
            self._put(at, [_heat(run), _logs(run), _checkpoints(run)])

    def _draw_verdicts(self) -> None:
        """What looks at the latest steps of all ranks, and at other runs."""
        records = [run.record() for run in self.runs]
        records = [replace(record, ranks=_Restful(record.ranks, self._pace.rest)) for record in records]
        for at, record in enumerate(records):
            facts = analyse(record, self._prices[at])
            self._facts[at], self._judged_at[at] = replace(facts, met=()), time.time()
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
    """Does a work when something has come, and so seldom, or with such rests, that it takes `_SHARE` of a core at most.

    over: an event that ends all rests.
    """

    def __init__(self, work: Callable[[], None], over: threading.Event) -> None:
        self._work, self._over = work, over
        self._seen, self._due, self._done = -1, 0.0, time.monotonic()
        self._begun: float | None = None  # by the clock of the thread's core, of what was not rested for yet

    def turn(self, version: int) -> None:
        """version: another number where something has come."""
        now = time.monotonic()
        if now < self._due or (version == self._seen and now < self._done + _CLOCK):
            return
        self._begun = time.thread_time()
        self._work()
        owed, self._begun = (time.thread_time() - self._begun) / _SHARE, None
        self._seen, self._done = version, now
        self._due = time.monotonic() + max(_LEAST, owed)

    def rest(self) -> None:
        """The work calls it where it can wait; outside of a turn nothing is waited for."""
        if self._begun is not None and (spent := time.thread_time() - self._begun) > _SLICE:
            self._over.wait(spent / _SHARE)
            self._begun = time.thread_time()


class _Restful(tuple[RankFacts, ...]):
    """The ranks of a run, with a rest after each, whoever goes through them."""

    rest: Callable[[], None]

    def __new__(cls, ranks: Sequence[RankFacts], rest: Callable[[], None]) -> Self:
        self = super().__new__(cls, ranks)
        self.rest = rest
        return self

    def __iter__(self) -> Iterator[RankFacts]:
        for facts in super().__iter__():
            yield facts
            self.rest()


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
