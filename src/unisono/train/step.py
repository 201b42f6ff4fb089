"""One optimiser step, on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.comm.mesh import Mesh
from unisono.observe.span import Recorder
from unisono.parallel.play import Leaf, Player
from unisono.parallelize import Local
from unisono.programs.pipeline import Action, Timetable
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
