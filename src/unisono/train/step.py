"""One optimiser step, on every rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.comm.mesh import Mesh
from unisono.observe.span import Recorder
from unisono.parallel.play import Leaf, Player
from unisono.parallelize import Local
from unisono.programs.pipeline import Action, Timetable
from unisono.spec.training import Metric
from unisono.sync import Sync, Verdict
from unisono.train.clip import Measure
from unisono.train.gradients import Gradients
from unisono.train.update import Report, Update

if TYPE_CHECKING:
    from unisono.train.join import Replica


@dataclass(slots=True)
class Run:
    """A live run on one rank, among certain members. `step` is the number of updates made; all else `join` made anew.

    leaves: that this rank computes, of `of_leaves` in the global batch. timetable: of all rows of the pipeline; `row`
    is this rank's, `eval_row` its forwards alone.
    """

    replica: "Replica"
    mesh: Mesh
    leaves: range
    of_leaves: int
    local: Local
    player: Player
    timetable: Timetable
    row: Sequence[Action]
    eval_row: Sequence[Action]
    sync: Sync
    gradients: Gradients
    measure: Measure
    update: Update
    seed: int
    recorder: Recorder
    step: int = 0


def train_step(run: Run, leaves: Sequence[Leaf], stop: bool = False) -> Report:
    """Forward, backward, meet, clip, update. Every rank calls it, or it hangs.

    stop: this rank was asked to stop; the report says whether any rank was. A step whose loss or norm is not finite
    changes nothing.
    """
    gradients = run.gradients
    losses = run.player.play(
        run.row, leaves, run.sync.weigh(targets_of(run, leaves) / run.mesh.dp.size), run.seed
    )
    with run.recorder.span("backward", op="close"):
        verdict = gradients.close(losses, stop)
    with run.recorder.span("optim"):
        report = run.update(run.step, verdict, gradients.numbers(run.measure))
        gradients.forget()
    run.step += report.verdict is not Verdict.DISCARD
    run.sync.after_update(report.step)
    return report


def targets_of(run: Run, leaves: Sequence[Leaf]) -> float:
    """Targets of the global batch of which this rank computes these leaves: all leaves have as many."""
    return sum(leaf.targets.numel() for leaf in leaves) * run.of_leaves / len(leaves)


@torch.no_grad()
def evaluate(
    run: Run, batches: Sequence[Sequence[Leaf]], metrics: Sequence[Metric] = ()
) -> tuple[float, dict[str, float]]:
    """(mean loss in nats per target over the batches of all data ranks, metrics by name); the same on every rank.

    Every rank of the run calls it, or it hangs.
    """
    mesh = run.mesh
    total = torch.zeros(1 + len(metrics), dtype=torch.float64, device=run.local.device)
    run.local.train(False)
    for leaves in batches:
        weight = 1.0 / (targets_of(run, leaves) * len(batches))
        with _counted(run, metrics, total[1:], weight) if metrics else nullcontext():
            total[0] += run.player.play(run.eval_row, leaves, weight, None).sum()
    run.local.train(True)
    if not run.gradients.places.counted:
        total.zero_()
    loss, *means = mesh.world.all_reduce(total).tolist()
    return loss, {m.name: m.value(mean, loss) for m, mean in zip(metrics, means, strict=True)}


@contextmanager
def _counted(run: Run, metrics: Sequence[Metric], means: Tensor, weight: float) -> Iterator[None]:
    """While it lasts, whoever computes a loss also adds what the metrics count, times `weight`, to `means`."""
    heads = [(stage, stage.loss) for stage in run.local.stages.values() if stage.last]
    for stage, _ in heads:

        def both(y: Tensor, targets: Tensor, own: Any = stage.loss, whole: Any = stage.whole) -> Tensor:
            logits = whole(y)
            for place, metric in enumerate(metrics):
                means[place] += weight * metric.count(logits, targets)
            return own(y, targets)

        stage.loss = both
    try:
        yield
    finally:
        for stage, own in heads:
            stage.loss = own
