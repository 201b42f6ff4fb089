"""Ranks that play a timetable with stages that compute nothing for a set time, over links of a set delay.

The interpreter, its wires, the recorder and the trace files are the runtime's own; only what a stage does is made up.
Waiting needs no core, so two cores host any number of ranks without their being in each other's way.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.comm.group import Group, Pending
from unisono.comm.mesh import Mesh, Shape
from unisono.observe import trace
from unisono.observe.span import Recorder
from unisono.parallel.cut import Stage
from unisono.parallel.play import StagePlayer
from unisono.parallel.post import Wire
from unisono.programs.pipeline import Placed, Timetable, lower, play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.train.data.feed import Micro

WIDTH = 64  # elements of a message; the first one says when it left
PINGS = 40
SPUN = 1e-3  # seconds


def wait(seconds: float) -> None:
    """Returns `seconds` from now or later, never sooner; the last bit is spun, since sleeping takes longer than asked."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        if left > SPUN:
            time.sleep(left - SPUN)


class Work(torch.autograd.Function):
    """x, in a set time forward and in another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: float, back: float) -> Tensor:
        ctx.back = back
        wait(ahead)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        wait(ctx.back)
        return grads[0], None, None


class Block(nn.Module):
    """A pass that takes `ahead` seconds; backwards `back` towards its input and `weight` towards its weight, which takes
    both where the input asks for no gradient."""

    def __init__(self, ahead: float, back: float, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.ahead, self.back, self.later = ahead, back, weight

    def forward(self, x: Tensor, noise: object) -> Tensor:
        later = self.later + (0.0 if x.requires_grad else self.back)
        return Work.apply(x, self.ahead, self.back) + Work.apply(self.weight, 0.0, later)  # type: ignore[operator]


class Ends(nn.Module):
    """Stem and head, which do nothing."""

    def forward(self, x: Tensor, noise: object = None) -> Tensor:
        return x


class Model(nn.Module):
    """One block a stage."""

    def __init__(self, forward: list[float], backward: list[float], weight: list[float]) -> None:
        super().__init__()
        self.stem, self.head = Ends(), Ends()
        self.blocks = nn.ModuleList(map(Block, forward, backward, weight))
        self.anatomy = SimpleNamespace(ties=())

    def loss(self, y: Tensor, targets: Tensor) -> Tensor:
        return y.mean()


@dataclass(frozen=True)
class Arriving:
    """A message that may not be seen before `delay` seconds after it left."""

    inner: Pending
    message: Tensor
    delay: float

    def wait(self) -> None:
        self.inner.wait()
        wait(self.message.view(-1)[0].item() + self.delay - time.perf_counter())


@dataclass(frozen=True)
class Link:
    """A group whose messages carry the time at which they left. All ranks of a host read the same clock."""

    group: Group
    delay: float

    def start_send(self, x: Tensor, to: int) -> Pending:
        x.view(-1)[0] = time.perf_counter()
        return self.group.start_send(x, to)

    def start_recv(self, out: Tensor, source: int) -> Pending:
        return Arriving(self.group.start_recv(out, source), out, self.delay)


def simulated(
    timetable: Timetable, forward: list[float], backward: list[float], weight: list[float], send: float
) -> list[Placed]:
    """What `play` does, against the clock. A chain's first stage has no input that asks for a gradient."""
    stages, length = range(timetable.stages), timetable.length
    back = [backward[i % length] if i % length else 0.0 for i in stages]
    later = [weight[i % length] + (0.0 if i % length else backward[0]) for i in stages]
    ahead = [forward[i % length] for i in stages]
    if timetable.splits_backward:
        return play_costs(timetable, ahead, back, send, later)
    return play_costs(timetable, ahead, [b + w for b, w in zip(back, later, strict=True)], send)


def waits(placed: Sequence[Placed], rows: int) -> float:
    """The largest share of a row's time, from its first start to its last stop, in which it computes nothing."""
    shares = []
    for row in range(rows):
        own = [p for p in placed if p.row == row]
        span = max(p.stop for p in own) - min(p.start for p in own)
        shares.append(1 - sum(p.stop - p.start for p in own) / span)
    return max(shares)


def closed(schedule: str, ranks: int, micros: int, cost: float) -> float:
    """The same as the schedule's own formula has it, for stages of equal cost: `cost` a forward, as much each half of a
    backward."""
    one = SCHEDULES.read(schedule)
    table = one.timetable(ranks, micros)
    row = cost * len(table.owned(0)) / table.chains
    idle = one.idle(ranks, micros, row, 2 * row, row)
    return idle / (idle + 3 * row * micros)


def play(
    ctx: Any,
    folder: str,
    schedule: str,
    micros: int,
    forward: list[float],
    backward: list[float],
    weight: list[float],
    delay: float,
    steps: int,
) -> float:
    """Play `steps` steps, leave the trace in `folder`; returns the seconds that a message takes (median of some).

    forward, backward (towards the input), weight: seconds of each stage of the model. Runs in every rank.
    """
    timetable, length = SCHEDULES.read(schedule).timetable(ctx.world, micros), len(forward)
    ranks, recorder = ctx.world, Recorder(ctx.rank)
    mesh = Mesh(Shape(pp=ranks), ctx.rank, recorder, timedelta(seconds=60))
    ahead, back = Link(mesh.pp, delay), Link(mesh.pp_back, delay)
    wire = Wire(ahead, back, (torch.empty(WIDTH, dtype=torch.float64, device="meta"),))  # type: ignore[arg-type]
    stages = {
        i: Stage(Model(forward, backward, weight), range(i % length, i % length + 1), i % length, length)
        for i in timetable.owned(ctx.rank)
    }
    player = StagePlayer(
        stages,
        dict.fromkeys(range(timetable.stages), wire),
        recorder,
        nullcontext,
        lambda turn: None,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    row = lower(timetable).rows[ctx.rank]
    leaves = [_leaf() for _ in range(micros)]
    message = _message(mesh, ahead)
    recorder.keep = True
    for step in range(steps):
        recorder.step = step
        if ranks > 1:
            dist.barrier()
        player.play(row, leaves, 1.0, None)
    trace.write(
        Path(folder) / f"rank{ctx.rank}.json.gz",
        recorder.take(),
        ctx.rank,
        ranks,
        epoch_ns=recorder.epoch_ns,
        host=ctx.host,
        backend=ctx.backend,
        coords=mesh.at,
    )
    return message


def _leaf() -> Micro:
    zeros = torch.zeros(WIDTH, dtype=torch.float64)
    return Micro(zeros, zeros, torch.zeros(1, dtype=torch.int64))


def _message(mesh: Mesh, link: Link) -> float:
    """Seconds from a message's leaving the first rank to its being there for a second one that waits for it."""
    took = []
    for _ in range(PINGS if len(mesh.pp.ranks) > 1 else 0):
        x = torch.zeros(WIDTH, dtype=torch.float64)
        dist.barrier()
        if mesh.rank == 0:
            wait(0.002)  # the other one waits by then
            link.start_send(x, 1).wait()
        elif mesh.rank == 1:
            link.start_recv(x, 0).wait()
            took.append(time.perf_counter() - x[0].item())
    return statistics.median(took) if took else 0.0
