"""What is known of a run while it goes on, gathered from the ranks' events. Pure: no terminal, no torch."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.spec.words import count, instrument, seconds

COMPUTE = ("forward", "backward", "optim")
BARS = "▁▂▃▄▅▆▇█"
AWAITED = 0.15
"""Share of the step by which a rank must wait less than another to be named as the one that others wait for."""


@dataclass
class RankRow:
    """The last that a rank said of itself: `ms` per step, shares of the step between 0 and 1, memory in MiB."""

    host: str = ""
    stage: int | None = None
    step: int = 0
    ms: float = 0.0
    compute: float = 0.0
    comm: float = 0.0
    waiting: float = 0.0
    mem_mib: float = 0.0
    note: str = "starting"


@dataclass
class Board:
    """The run as a whole, and its rows by rank. unit: what its speed counts, tokens or samples."""

    steps: int
    unit: str = "tokens"
    rows: dict[int, RankRow] = field(default_factory=dict)
    step: int = 0
    loss: float | None = None
    val_loss: float | None = None
    per_second: float = 0.0
    saved: str = ""
    doing: str = ""  # beside steps, while that takes its time: `validating, 20 batches`
    losses: list[float] = field(default_factory=list)
    instruments: dict[str, float] = field(default_factory=dict)  # the latest of each, by its key
    _first: tuple[int, float] | None = None
    _last: tuple[int, float] = (0, 0.0)

    def hear(self, rank: int, event: Mapping[str, Any], now: float) -> None:
        """Take in an event of a rank; `now` in seconds on any steady clock."""
        match event["kind"]:
            case "start" | "ready":
                row = self.rows.setdefault(rank, RankRow())
                row.note = "starting" if event["kind"] == "start" else "ready"
            case "step":
                self._stepped(rank, event, now)
            case "val":
                self.val_loss, self.doing = event["loss"], ""
            case "doing":
                self.doing = event["text"]
            case "saved":
                self.saved = event["path"]

    def expect(self, ranks: int) -> None:
        """Rows for ranks that will come, so that the ones that do not are seen to be missing."""
        for rank in range(ranks):
            self.rows.setdefault(rank, RankRow())

    def speaker(self) -> int:
        """The rank whose losses and speed are taken: they are the whole run's on every rank."""
        return min(self.rows, default=0)

    def _stepped(self, rank: int, event: Mapping[str, Any], now: float) -> None:
        row = self.rows.setdefault(rank, RankRow())
        row.host, row.stage = event.get("host", row.host), event.get("stage", row.stage)
        row.step, row.ms = event["step"], event.get("ms", 0.0)
        row.mem_mib, row.note = event.get("mem_mib", 0.0), ""
        row.compute, row.comm, row.waiting = shares(event.get("times", {}))
        if rank != self.speaker():
            return
        self.doing, self.steps = "", event.get("steps", self.steps)
        self.step, self.per_second = event["step"], event.get("tokens_per_s", 0.0)
        self._first = self._first or (self.step, now)
        self._last = (self.step, now)
        self.instruments |= event.get("instruments", {})
        loss = event.get("loss")
        if loss is not None:
            self.loss = loss
            self.losses.append(loss)

    def seconds_left(self) -> float | None:
        """From the pace since the first step; None before there is one."""
        if self._first is None or self._last[0] <= self._first[0]:
            return None
        pace = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return max(0, self.steps - self.step) * pace

    def awaited(self) -> int | None:
        """The rank that the others wait for: the one that waits clearly less. None when there is no such rank."""
        rows = {rank: row for rank, row in self.rows.items() if row.step}
        if len(rows) < 2:
            return None
        low = min(rows, key=lambda rank: rows[rank].waiting)
        second = min(row.waiting for rank, row in rows.items() if rank != low)
        return low if second - rows[low].waiting >= AWAITED else None

    def line(self) -> str:
        """The run in one line of plain text."""
        words = [f"step {self.step}/{self.steps}"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4f}")
        if self.val_loss is not None:
            words.append(f"validation {self.val_loss:.4f}")
        words += [instrument(key, value) for key, value in self.instruments.items()]
        if self.per_second:
            words.append(f"{count(self.per_second)} {self.unit}/s")
        left = self.seconds_left()
        if left is not None and self.step < self.steps:
            words.append(f"{seconds(left)} left")
        if self.saved:
            words.append(f"saved {self.saved}")
        return "   ".join(words)


def shares(times: Mapping[str, float]) -> tuple[float, float, float]:
    """Shares of the step spent computing, in exposed communication, and waiting. Hidden communication costs none."""
    total = sum(spent for part, spent in times.items() if part != "comm_hidden")
    if total <= 0:
        return 0.0, 0.0, 0.0
    compute = sum(times.get(part, 0.0) for part in COMPUTE)
    comm = times.get("comm_exposed", times.get("comm", 0.0))
    return compute / total, comm / total, times.get("wait", 0.0) / total


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """`values` as at most `width` bars, the mean of neighbours each; a value that is no number is drawn as `x`."""
    if not values:
        return ""
    bars = min(width, len(values))
    cuts = [len(values) * i // bars for i in range(bars + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] if math.isfinite(mean) else "x" for mean in means)
