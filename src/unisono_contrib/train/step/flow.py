"""Steps of a pipeline that is not emptied between them: who updates when, and what of later steps is known."""

import math
from collections import deque

import torch
from torch import Tensor

from unisono.comm.group import Pending
from unisono.parallel.play import StagePlayer
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.sync import Verdict
from unisono.train.step.grad_norm import ByTensor, Measure
from unisono.train.step.gradients import Gradients
from unisono.train.step.numbers import Numbers
from unisono.train.step.overlap import unflushed
from unisono.train.step.run import Run
from unisono.train.step.update import Report, Update, set_rate
from unisono_contrib.parallel.flow import FlowPlayer


def flowing(run: Run, plan: Plan) -> Run:
    """The run of a plan whose pipeline is not emptied: it plays on over the ends of steps and updates inside."""
    schedule = unflushed(plan)
    if schedule is None:
        raise TypeError(f"under {plan} the pipeline is emptied after each step")
    if not isinstance(run.player, StagePlayer) or not isinstance(run.gradients, FlowGradients):
        raise TypeError("a run that was just built plays with its stages")
    if run.local.routers:
        what = (
            f"schedule={plan.schedule} updates each stage for itself, and routers of experts vote all at once"
        )
        raise UsageError(what, where="plan.schedule, model.kind", fix="schedule=1f1b", code="P24")
    slots, ranks, update = run.local.slots, run.mesh.pp.size, run.update
    run.player = FlowPlayer(run.player, schedule, ranks, len(run.leaves), slots, run.row)
    run.gradients.follow(run, run.player)
    run.update = FlowUpdate(update.optimizer, update.slots, update.rate, update.max_norm, update.scaler)
    return run


class FlowGradients(Gradients):
    """Gradients of a stage that makes its update inside the row, without the norm of the other stages.

    The numbers of a step are added up over the stages while they go on; `numbers` waits for them. A stage whose own
    gradient is not finite does not update; that the run cannot go on, all learn from the numbers.
    """

    overlap = True

    def follow(self, run: Run, player: FlowPlayer) -> None:
        """Make the updates of this run, whose step is the one that is played."""
        self.run, self.player = run, player
        self._sums: deque[tuple[Tensor, Pending]] = deque()
        self._stop = self._stopping = False
        player.update = self._update

    def _update(self, offset: int, losses: Tensor) -> None:
        """The update of the step that is `offset` after the run's."""
        run, update = self.run, self.run.replica.update
        super().close(losses, self._stop)
        line = self._measure.line(self.slots, self.line.values)
        if bool(torch.isfinite(line).all()):
            set_rate(update.optimizer, update.rate(run.step + offset))
            update.optimizer.step()
        self._sums.append((line, run.mesh.replica.start_all_reduce(line)))
        super().forget()

    @property
    def _measure(self) -> ByTensor:
        if not isinstance(self.run.measure, ByTensor):
            raise TypeError("what measures is not the run's own")
        return self.run.measure

    def close(self, losses: Tensor | None = None, stop: bool = False) -> Verdict:
        """All is done inside the row. stop: is told with the next update."""
        self._stop |= stop
        return Verdict.APPLY

    def numbers(self, measure: Measure) -> Numbers:
        """Of the run's step. Whoever is asked to stop lets the pipeline run empty first."""
        line, pending = self._sums.popleft()
        pending.wait()
        norm, *rest = self._measure.read(line)
        loss = math.fsum(rest[:-2])
        if rest[-2] and not self._stopping:
            self._stopping = True
            self.player.run_empty()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            for _, later in self._sums:
                later.wait()
            self._sums.clear()
            self.player.abandon()
            super().forget()
        return Numbers(norm, loss, self._stopping and self.player.empty)

    def forget(self) -> None:
        """A step's gradients are dropped by its update; those of the next ones are under way."""

    def release(self) -> None:
        super().forget()
        super().release()


class FlowUpdate(Update):
    """Tells of an update that was made inside the row."""

    def __call__(self, step: int, verdict: Verdict, numbers: Numbers) -> Report:
        finite = math.isfinite(numbers.loss) and math.isfinite(numbers.norm)
        verdict = Verdict.APPLY if finite else Verdict.DISCARD
        bad = self.judge(step, verdict, numbers)
        return Report(
            step, numbers.loss, numbers.norm, self.rate(step), verdict, numbers.stop, finite, bad=bad
        )
