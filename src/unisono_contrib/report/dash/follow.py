"""A run folder that is followed while its run goes on, as the model of a run that the report has too (`RunRecord`).

What grows is read once. Of ranks the latest steps are kept whole, the others as their lateness alone.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unisono.report.collect import RunRecord, add_steps, collect_around, in_used_axes, rank_facts
from unisono.spec import words
from unisono.spec.runs import CHECKPOINTS, HISTORY, LOG, PROOF
from unisono_contrib.report.dash.lateness import LatenessMap, Seen, seen_in
from unisono_contrib.report.dash.tail import LineTail, RankTail, Record

KEPT = 12_000
"""Lines of ranks that are kept whole, of all ranks together."""
_LOGS = 50_000
_PASS = 64 << 20  # bytes of all ranks that are read before others have their turn
_PARSED = 1 << 20  # lines of a past that are read one by one; of a longer one every second, fourth ... step
_SHARE = 0.005  # of a core, that reading may take once the past has been read
_REST = 10.0  # seconds between two looks at most
_TICK = 2 * 10**9  # nanoseconds within which a folder may change twice and show one time
_BEHIND = 4  # steps: ranks so far behind the newest are not waited for any longer
_FINE = 40_000  # cells that are read anew when somebody looks at them, in some seconds
_AROUND = (
    "config.resolved.toml", "env.json", "summary.json", "error.json", "prediction.json", HISTORY, PROOF,
    CHECKPOINTS, "trace",
)  # fmt: skip


class FollowedRun:
    """One run folder. `turn` reads what has come; all else answers from memory, or reads single lines.

    lock: held by whoever reads or changes it. every: one in so many steps of each rank is looked at.
    """

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name, self.lock, self._refining = folder, name, threading.RLock(), threading.Lock()
        self.late = LatenessMap()
        self.logs: deque[Record] = deque(maxlen=_LOGS)
        self.every, self.is_caught_up, self._due, self._looked = 1, False, 0.0, 0.0
        self.version, self.log_count, self.latest_at = 0, 0, 0.0
        self.tails: dict[int, RankTail] = {}
        self._steps: dict[int, Record] = {}
        self._metrics = LineTail(str(folder / "metrics.jsonl"))
        self._log = LineTail(str(folder / LOG))
        self._recent: dict[int, dict[int, Record]] = {}
        self._places: dict[int, Record] = {}
        self._around, self._seen, self._events = RunRecord(folder), "", 0

    def turn(self, at_once: bool = False) -> None:
        """Read what has come, or a part of it; the ranks' files less often where there are many, unless `at_once`."""
        with self.lock:
            news = self._read_around() + self._read_metrics() + self._read_logs() + self._find_ranks()
        if at_once or not self.is_caught_up or time.monotonic() >= self._due:
            begun = time.thread_time()
            lines = self._read_ranks()
            self._pace(time.thread_time() - begun, lines)
            news += lines
        if news:
            with self.lock:
                self.version, self.latest_at = self.version + 1, _changed(Path(self._metrics.path)) * 1e-9

    def record(self) -> RunRecord:
        """The run as far as it is: all its steps, and of ranks the latest ones."""
        with self.lock:
            ranks = [
                rank_facts(rank, self._places.get(rank, {}), [steps[at] for at in sorted(steps)])
                for rank, steps in sorted(self._recent.items())
            ]
            steps = tuple(self._steps[at] for at in sorted(self._steps))
            return replace(self._around, steps=steps, ranks=tuple(in_used_axes(ranks)))

    def lines_of(self, step: int) -> dict[int, Record]:
        """What each rank wrote of a step."""
        with self.lock:
            tails = list(self.tails.items())
            recent = {rank: steps[step] for rank, steps in self._recent.items() if step in steps}
        missing = {rank: tail.between(step, step) for rank, tail in tails if rank not in recent}
        return recent | {rank: lines[-1] for rank, lines in missing.items() if lines}

    def refine(self, first: int, last: int) -> None:
        """Read the steps of a stretch that were passed over, where these are few enough to be looked at singly."""
        with self._refining:  # windows overlap: what the first reads the next has
            with self.lock:
                unread = self.late.unread(first, last) if self.every > 1 or not self.is_caught_up else []
                tails = list(self.tails.items())
            if not unread or len(unread) * max(1, len(tails)) > _FINE:
                return
            steps: dict[int, dict[int, Seen]] = {}
            for rank, tail in tails:
                for line in tail.between(unread[0], unread[-1]):
                    if (seen := seen_in(rank, line)) is not None:
                        steps.setdefault(line["step"], {})[rank] = seen
            with self.lock:
                self.late.place(steps)

    def checkpoints(self, most: int = 12) -> list[tuple[int, float, str]]:
        """(step, Unix time, size in words) of the newest checkpoints, newest first."""
        kept = []
        for path in (self.folder / CHECKPOINTS).glob("step-*/manifest.json"):
            with suppress(OSError, ValueError):
                size = sum(file.stat().st_size for file in path.parent.iterdir())
                kept.append((int(path.parent.name[5:]), path.stat().st_mtime, words.nbytes(size)))
        return sorted(kept, reverse=True)[:most]

    def _read_around(self) -> int:
        """Read small files again if one of them has changed."""
        seen = "".join(f"{_changed(self.folder / name)}" for name in _AROUND)
        if seen == self._seen:
            return 0
        self._seen, self._around = seen, collect_around(self.folder)
        return 1

    def _read_metrics(self) -> int:
        restarts = self._metrics.restarts
        records = self._metrics.records()
        if self._metrics.restarts != restarts:
            self._steps.clear()
        add_steps(self._steps, records)
        return len(records)

    def _read_logs(self) -> int:
        records = self._log.records()
        self.logs.extend(records)
        self.log_count += len(records)
        return len(records)

    def _find_ranks(self) -> int:
        """Tails for the files of ranks that have come, and what they end with: the present before the past."""
        folder = self.folder / "events"
        if (changed := _changed(folder)) == self._events and time.time_ns() > changed + _TICK:
            return 0  # no file has come or gone
        self._events = changed
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        ranks = {int(m[1]) for name in names if (m := re.fullmatch(r"rank(\d+)\.jsonl", name))}
        new = sorted(ranks - self.tails.keys())
        first = not self.tails
        for rank in new:
            self.tails[rank] = RankTail(rank, LineTail(str(folder / f"rank{rank}.jsonl")))
        if new and first:
            self._look_ahead()
        return len(new)

    def _look_ahead(self) -> None:
        """What the ranks' files end with; and how much of a long past is to be read."""
        longest = 0
        for tail in self.tails.values():
            lines = tail.newest()
            self._take(tail.rank, lines)
            longest = max(longest, max((r["step"] for r in lines if _is_step(r)), default=0))
        self.late.settle(longest)
        while longest * len(self.tails) / self.every > _PARSED:
            self.every *= 2

    def _read_ranks(self) -> int:
        """A pass over the ranks' files."""
        tails = list(self.tails.values())
        most, news, behind = max(1 << 14, min(4 << 20, _PASS // max(1, len(tails)))), 0, list[int]()
        for count, tail in enumerate(tails):
            offset, restarts = tail.lines.offset, tail.lines.restarts
            records = tail.read(self.every, most)
            there_is_more = tail.lines.offset - offset > most // 2
            if records:
                with self.lock:
                    self._take(tail.rank, records, is_past=there_is_more)
            if tail.lines.restarts != restarts:  # the run goes on from an earlier step
                with self.lock:
                    self.late.forget_after(tail.last)
            news += len(records)
            if there_is_more:
                behind.append(tail.last)
            if not self.is_caught_up and count % 16 == 15:
                time.sleep(0.0005)  # others have the lock for once
        with self.lock:
            self.late.settle(min(behind) if behind else self.late.steps - _BEHIND)
        self.is_caught_up = not behind
        return news

    def _take(self, rank: int, records: Sequence[Record], is_past: bool = False) -> None:
        """is_past: newer lines of the rank are in the file, and may have been read ahead."""
        steps = [record for record in records if _is_step(record)]
        for at, record in enumerate(records):
            if record.get("kind") == "info" and not (is_past and rank in self._places):
                self._places[rank] = record
                self.late.places[rank] = rank_facts(rank, record, ()).coords
                if not is_past:  # a start: what was measured before is of another plan
                    self._recent.pop(rank, None)
                    steps = [later for later in records[at:] if _is_step(later)]
        if not is_past:
            self._keep(self._recent.setdefault(rank, {}), steps)
        self.late.put(rank, [record for record in records if _is_step(record)])

    def _keep(self, recent: dict[int, Record], steps: Sequence[Record]) -> None:
        """Put the latest steps with those that are kept, which ascend; of a step that is made again, what came after it
        goes."""
        most = max(12, min(200, KEPT // max(1, len(self.tails))))
        for record in steps[-most:]:
            while recent and next(reversed(recent)) >= record["step"]:
                recent.popitem()
            recent[record["step"]] = record
        while len(recent) > most:
            del recent[next(iter(recent))]

    def _pace(self, cpu: float, lines: int) -> None:
        """Look less often, and then at fewer steps, where looking takes more than its share of a core; at one step a
        look at least, since opening the files takes its time too."""
        wanted, now = cpu / _SHARE, time.monotonic()
        elapsed, self._looked = now - self._looked, now
        self._due = now + min(wanted, _REST)
        if wanted > _REST and self.is_caught_up:
            coming = lines * self.every * _REST / elapsed
            while coming / self.every > 1.5 * max(len(self.tails), lines * _REST / wanted):
                self.every *= 2
        elif wanted < _REST / 4 and self.every > 1:
            self.every //= 2


def _is_step(record: Record) -> bool:
    return (
        record.get("kind") == "step"
        and isinstance(record.get("step"), int)
        and isinstance(record.get("time"), dict)
    )


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
