"""What a person sees of a run: a live table of ranks on a terminal, a plain line now and then elsewhere. No torch.

Everything goes to stderr; stdout is for data.
"""

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 10.0
WAITS_LITTLE = 0.5
"""A rank that waits less than this share of what the others wait is the one they wait for."""


@dataclass(slots=True)
class RankLine:
    """What is known of one rank."""

    coords: dict[str, int] = field(default_factory=dict)
    step: int = 0
    ms: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    mem_mib: float = 0.0
    note: str = "starting"


class Screen:
    """Hears the events of all ranks and draws them. Use as a context manager around the run."""

    def __init__(self, ranks: int, steps: int, title: str, plan: str, quiet: bool, color: bool) -> None:
        self.ranks, self.steps, self.title, self.plan, self.quiet = ranks, steps, title, plan, quiet
        self.lines = [RankLine() for _ in range(ranks)]
        self.losses: list[float] = []
        self.rate = 0.0
        self.begun: float | None = None
        self.first_step = 0
        self.notes: list[str] = []
        self.console = Console(stderr=True, no_color=not color, highlight=False)
        self.live: Live | None = None
        self._last_plain = 0.0

    def __enter__(self) -> Self:
        if not self.quiet:
            plural = "process" if self.ranks == 1 else "processes"
            self._say(f"starting {self.ranks} {plural} (importing torch) ...")
            if self.console.is_terminal and not self.console.is_dumb_terminal:
                self.live = Live(
                    console=self.console, refresh_per_second=8, get_renderable=self._draw, transient=False
                )
                self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def event(self, rank: int, event: dict[str, Any]) -> None:
        """Take in one event of one rank (-1: of who starts them)."""
        kind = event.get("kind")
        line = self.lines[rank] if 0 <= rank < self.ranks else RankLine()
        if kind == "step":
            self._step(rank, line, event)
        elif kind == "ready":
            line.coords, line.note = event.get("coords", {}), ""
            self.first_step = event.get("step", 0)
            self.begun = self.begun or time.monotonic()
        elif kind == "output":
            self._say(f"rank {rank} | {event['text'].rstrip()}")
        elif kind == "val":
            self._say(f"step {event['step']}: validation loss {event['loss']:.4f}")
        elif kind == "saved":
            self._say(f"saved {event['path']}")
        elif kind == "stopping":
            self._say("stopping: this step is finished and saved first; Ctrl-C again stops now")
        elif kind == "note":
            self._say(event["text"])

    def _step(self, rank: int, line: RankLine, event: dict[str, Any]) -> None:
        line.step, line.ms, line.mem_mib = event["step"], event["ms"], event["mem_mib"]
        smooth = 0.7 if line.times else 0.0
        line.times = {
            k: smooth * line.times.get(k, 0.0) + (1 - smooth) * v for k, v in event["times"].items()
        }
        if rank == 0:
            self.losses.append(event["loss"])
            self.rate = (
                event["tokens_per_s"] if not self.rate else 0.8 * self.rate + 0.2 * event["tokens_per_s"]
            )
            self._plain(line)

    def _plain(self, line: RankLine) -> None:
        if self.quiet or self.live is not None:
            return
        now = time.monotonic()
        if now - self._last_plain >= PLAIN_SECONDS or line.step >= self.steps:
            self._last_plain = now
            left = self.left(line.step)
            self._say(
                f"step {line.step}/{self.steps}  loss {self.losses[-1]:.4f}  {self.rate:,.0f} targets/s  {left}"
            )

    def _say(self, text: str) -> None:
        if self.quiet:
            return
        if self.live is not None:
            self.live.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def left(self, step: int) -> str:
        """How long it will go on, in words."""
        done = step - self.first_step
        if self.begun is None or done <= 0:
            return ""
        seconds = (time.monotonic() - self.begun) / done * (self.steps - step)
        return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"

    def _draw(self) -> RenderableType:
        step = self.lines[0].step
        width = 24
        full = round(width * step / self.steps) if self.steps else width
        head = Text()
        head.append(f"plan   {self.plan}\n")
        head.append(f"train  [{'#' * full}{'-' * (width - full)}] {step}/{self.steps}")
        head.append(f"   {self.rate:,.0f} targets/s   {self.left(step)}\n" if self.rate else "\n")
        if self.losses:
            head.append(f"loss   {self.losses[0]:.3f} {sparkline(self.losses)} {self.losses[-1]:.3f}")
        return Group(head, self._table())

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("rank", "place", "step", "step ms", "compute", "comm", "waiting", "memory"):
            table.add_column(name, justify="left" if name == "place" else "right")
        table.add_column("")
        slowest = slowest_rank(self.lines)
        for rank, line in enumerate(self.lines):
            total = sum(v for k, v in line.times.items() if k != "comm_hidden") or 1.0
            part = {
                name: sum(line.times.get(kind, 0.0) for kind in kinds) / total
                for name, kinds in (
                    ("compute", ("forward", "backward", "optim")),
                    ("comm", ("comm_exposed",)),
                    ("wait", ("wait",)),
                )
            }
            place = " ".join(f"{axis}={at}" for axis, at in line.coords.items() if axis in self.plan)
            note = "<- others wait for this one" if rank == slowest else line.note
            shares = [f"{part[name]:.0%}" if line.times else "" for name in ("compute", "comm", "wait")]
            memory = f"{line.mem_mib / 1024:.2f} GiB" if line.mem_mib else ""
            table.add_row(str(rank), place, str(line.step), f"{line.ms:.0f}", *shares, memory, note)
        return table


def sparkline(values: list[float], width: int = 32) -> str:
    """Values as little bars, at most `width` of them, each the mean of a run of values."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    chunk = max(1, -(-len(finite) // width))
    means = [sum(finite[i : i + chunk]) / len(finite[i : i + chunk]) for i in range(0, len(finite), chunk)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(7, int((v - low) / span * 8))] for v in means)


def slowest_rank(lines: list[RankLine]) -> int | None:
    """The rank that clearly waits least while the others wait, None if there is none: it is the one waited for."""
    shares = []
    for line in lines:
        total = sum(v for k, v in line.times.items() if k != "comm_hidden")
        shares.append(
            (line.times.get("wait", 0.0) + line.times.get("comm_exposed", 0.0)) / total if total else 0.0
        )
    if len(shares) < 2 or max(shares) < 0.1:
        return None
    least, second = sorted(shares)[:2]
    return shares.index(least) if least < WAITS_LITTLE * second else None
