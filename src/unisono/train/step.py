"""One optimiser step, on every rank."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.comm.mesh import Mesh
from unisono.observe.span import Recorder
from unisono.parallel.play import Leaf, Player, Turn
from unisono.parallelize import Local
from unisono.programs.pipeline import Action, Timetable
from unisono.sync import Sync, Verdict
from unisono.train.clip import Measure, clip, clip_and_step
from unisono.train.optim._make import set_rate
from unisono.train.tally import Tally


@dataclass(slots=True)
class Run:
    """A live run on one rank. `step` is the number of updates made; everything else is fixed.

    timetable: of all rows of the pipeline; `row` is this rank's, `eval_row` its forwards alone.
    """

    mesh: Mesh
    local: Local
    player: Player
    timetable: Timetable
    row: Sequence[Action]
    eval_row: Sequence[Action]
    sync: Sync
    optimizer: Optimizer
    rate: Callable[[int], float]
    max_norm: float
    seed: int
    tally: Tally
    measure: Measure
    recorder: Recorder
    step: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What one step did. loss: nats per target over the global batch. norm: before clipping."""

    step: int
    loss: float
    norm: float
    lr: float
    verdict: Verdict
    stop: bool = False

    @property
    def finite(self) -> bool:
        """Whether loss and norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def before_backward(local: Local, sync: Sync, tally: Tally) -> Callable[[Turn, Tensor], None]:
    """What the player tells of each backward: the step's final one lets gradients depart as they ripen."""

    def about_to(turn: Turn, losses: Tensor) -> None:
        local.sharding[turn.stage].before_backward(turn.last)
        if turn.final:
            tally.put(losses)
            if local.buckets.tail is not None:
                local.buckets.tail.copy_(tally.line)
            local.buckets.arm(sync.grad_ready)

    return about_to


def train_step(
    run: Run, leaves: Sequence[Leaf], stop: bool = False, inspect: Callable[[], None] | None = None
) -> Report:
    """Forward, backward, meet, clip, update.

    stop: this rank was asked to stop; the report says whether any rank was. inspect: called when gradients are
    final, before the update. A step whose loss or norm is not finite changes nothing.
    """
    local, mesh = run.local, run.mesh
    run.tally.wish(stop)
    targets = sum(leaf.targets.numel() for leaf in leaves) * mesh.shard.size
    run.player.play(run.row, leaves, run.sync.weigh(targets), run.seed)
    with run.recorder.span("backward", op="close"):
        for bucket in local.close_replica():
            run.sync.grad_ready(bucket)
    verdict = run.sync.settle()
    with run.recorder.span("optim"):
        local.join_ties()
        line = run.tally.line if local.buckets.tail is None else local.buckets.tail
        if not (local.holds_loss and mesh.tp.index == 0):
            line[:-1] = 0.0  # losses count once
        norm, *losses, stops = run.measure(local.slots, line)
        report = Report(run.step, math.fsum(losses), norm, run.rate(run.step), verdict, stops > 0)
        if verdict is Verdict.APPLY and report.finite:
            set_rate(run.optimizer, report.lr)
            if inspect is None:
                clip_and_step(run.optimizer, local.slots, norm, run.max_norm)
            else:
                clip(local.slots, norm, run.max_norm)
                inspect()
                run.optimizer.step()
            run.step += 1
        local.drop_gradients()
    run.sync.after_update(report.step)
    return report


@torch.no_grad()
def evaluate(run: Run, batches: Sequence[Sequence[Leaf]]) -> float:
    """Mean loss in nats per target over the batches of all data ranks; the same on every rank."""
    mesh = run.mesh
    total = torch.zeros((), dtype=torch.float64, device=run.local.device)
    run.local.train(False)
    for leaves in batches:
        targets = sum(leaf.targets.numel() for leaf in leaves) * mesh.data.size
        total += run.player.play(run.eval_row, leaves, 1.0 / (targets * len(batches)), None).sum()
    run.local.train(True)
    if not (run.local.holds_loss and mesh.tp.index == 0):
        total.zero_()
    return mesh.world.all_reduce(total).item()
