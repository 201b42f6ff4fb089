"""One optimiser step, on every rank."""

from collections.abc import Sequence

from unisono.parallel.player import Leaf
from unisono.sync import Verdict
from unisono.train.run import Run
from unisono.train.update import Report


def train_step(run: Run, leaves: Sequence[Leaf], stop: bool = False) -> Report:
    """Forward, backward, meet, clip, update. Every rank calls it, or it hangs.

    stop: this rank was asked to stop; the report says whether any rank was. A step whose loss or norm is not finite
    changes nothing.
    """
    gradients = run.gradients
    weight = run.sync.weigh(targets_of(run, leaves) / run.mesh.dp.size)
    losses = run.player.play(run.row, leaves, weight, run.seed)
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
