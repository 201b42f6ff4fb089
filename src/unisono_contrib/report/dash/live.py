"""Runs that are followed for who looks at them: panels that are worked out again when something has come, no more
often than a small share of a core allows, each with the number of its last change."""

import json
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from unisono.report.analyse import analyse
from unisono.report.charts import HEAT
from unisono.report.verdict.evidence import Prices
from unisono.report.verdict.judge import no_price
from unisono.spec.settings import tell
from unisono_contrib.report.compare import names_of
from unisono_contrib.report.dash import beside, panels
from unisono_contrib.report.dash.follow import FollowedRun
from unisono_contrib.report.dash.panels import Panel

_SHARE = 0.004  # of a core, that working out panels may take
_LEAST = 1.0  # seconds between two times


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
        self.boot, self.number = secrets.token_hex(4), 0
        self._texts: dict[tuple[int, str], tuple[int, str]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="unisono-dash", daemon=True)

    def start(self) -> None:
        """Read what there is of the present, then follow."""
        for run in self.runs:
            run.turn()
        self._draw()
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
        seen, due = [run.version for run in self.runs], 0.0
        while not self._over.is_set():
            busy = False
            for run in self.runs:
                try:
                    run.turn()
                except OSError as error:  # a file system that is away for a while
                    tell(f"note  {run.folder}: {error.strerror or error}")
                busy = busy or not run.is_caught_up
            now = time.monotonic()
            if now >= due:
                versions = [run.version for run in self.runs]
                begun = time.thread_time()
                self._draw(versions != seen)
                seen = versions
                due = now + max(_LEAST, (time.thread_time() - begun) / _SHARE)
            self._over.wait(0.001 if busy else min(run.rest for run in self.runs))

    def _draw(self, is_new: bool = True) -> None:
        """Work out all panels; where nothing has come only those that tell the time."""
        records = []
        for at, run in enumerate(self.runs):
            record = run.record()
            records.append(record)
            facts = analyse(record, self._prices[at])
            if facts.shares:
                self._step_s[at] = fmean(share.wall for share in facts.shares)
            if is_new:
                self._put(at, panels.of_run(record, facts, run.latest_at))
                self._put(at, [_heat(run), _logs(run), _checkpoints(run)])
                if self.whatif[at] is not None:
                    self._put(at, [_WHATIF | self.whatif[at]])
            else:
                self._put(at, [panels.head(record, facts, run.latest_at)])
        if len(self.runs) > 1 and is_new:
            names = [run.name for run in self.runs]
            self._put(-1, beside.panels(names, records))

    def _put(self, run: int, drawn: Sequence[Panel]) -> None:
        with self._lock:
            for panel in drawn:
                text = json.dumps({"run": run, **panel}, separators=(",", ":"), allow_nan=False, default=str)
                if self._texts.get((run, panel["id"]), (0, ""))[1] != text:
                    self.number += 1
                    self._texts[run, panel["id"]] = (self.number, text)


_WHATIF: Panel = {"id": "whatif", "kind": "whatif", "title": "What if: the planner's price of other ranks, links and batches",
                  "half": False}  # fmt: skip


def _heat(run: FollowedRun) -> Panel:
    with run.lock:
        late = run.late
        note = (
            "Seconds later than the median rank at the collective at which ranks were furthest apart."
            if late.by_calls
            else "Seconds of work beside the median rank's: these lines hold no collectives."
        )
        if run.every > 1:
            note += f" Drawn from one in {run.every} steps; zoom in to read all."
        if not run.is_caught_up:
            note += " The past is still being read."
        return {
            "id": "heat", "kind": "heat", "title": "How late each rank was in each step", "note": note,
            "ranks": late.ranks, "steps": late.steps, "version": late.version, "ramp": HEAT, "half": False,
        }  # fmt: skip


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
        "id": "checkpoints", "kind": "bars", "title": "Checkpoints", "charts": [], "table": table, "note": note, "half": True,
    }  # fmt: skip


def _clock_time(at: float) -> str:
    """`27 Nov 23:41:02`, in the time of this host."""
    return time.strftime("%d %b %H:%M:%S", time.localtime(at))
