"""Updates that are made layer by layer, while the next forward has begun: what `sync=priority` is for.

    close     the last slices depart; nobody waits for them
    forward   before a part of the model computes, its slices have landed, and its parameters are stepped
    begin     before the next backward all is done, so that the buckets are free

A step runs ahead only where nobody looks at the weights after it, and where each parameter's update needs its own
gradient alone. All else waits for every slice, as under `every_step`: the same update, in one piece.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from unisono.comm.bucket import Bucket
from unisono.comm.group import Group
from unisono.config import TrainConfig
from unisono.parallel.params import Slot
from unisono.parallelize import Local
from unisono.sync import Sync, Verdict
from unisono.train.step.grad_norm import Measure
from unisono.train.step.gradients import Gradients
from unisono.train.step.numbers import Line, LossPlaces, Numbers
from unisono.train.step.overlap import drains
from unisono.train.step.run import Run
from unisono.train.step.update import Report, Update, set_rate
from unisono_contrib.sync._priority import PrioritySync


class LocalLine(Line):
    """A line with one number more, after the losses: the sum of squares of each replica's own gradients. It is finite
    only if all of them are, and so is then the sum of the gradients."""

    def __init__(
        self, places: LossPlaces, dp: Group, device: torch.device, squares: Callable[[], Tensor]
    ) -> None:
        super().__init__(places, dp, device, more=1)
        self._squares = squares

    def write(self, losses: Tensor | None, stop: bool, lacks: bool) -> None:
        super().write(losses, stop, lacks)
        self.values[self.places.count] = self._squares()


class AheadGradients(Gradients):
    """Gradients that leave in slices, and may arrive when the next forward has begun. looked(made): whether anybody
    looks at the weights after so many updates; they are whole then."""

    overlap = True

    def __init__(self, slots: Sequence[Slot], dp: Group, sync: Sync, **parts: object) -> None:
        super().__init__(slots, dp, sync, **parts)  # type: ignore[arg-type]
        if not isinstance(sync, PrioritySync):
            raise TypeError("slices are a matter of sync=priority")
        self.slices = sync
        self.looked: Callable[[int], bool] = lambda step: True
        self.run: Run | None = None
        turn = {id(slot.master): (at, slot.name) for at, slot in enumerate(self.slots)}
        each = [*self._early, *self._late]
        sync.announce([(bucket, *min(turn[id(p)] for p in bucket.params)) for bucket in each])
        self.line = LocalLine(self.line.places, dp, self.line.values.device, self._local_squares)
        self._yet: list[Bucket] = []  # early ones that have not left in this step
        self._squares: list[Tensor] = []  # of this rank's own gradients, bucket by bucket
        self._left: set[int] = set()  # buckets on their way, of a step that goes on without them
        self._of: Mapping[nn.Module, Sequence[Bucket]] = {}
        self._norms: dict[int, Tensor] = {}  # of gradients that have arrived
        self.norm_before: float | None = None  # of the last step that ran ahead

    def follow(self, run: Run) -> None:
        """Run ahead from now on, where nobody looks: parts of the model wait for their own slices."""
        self.run, self._of = run, {}
        homes = {id(p): bucket for bucket in (*self._early, *self._late) for p in bucket.params}
        for part in parts_of(run.local):
            mine = {id(homes[id(p)]): homes[id(p)] for p in part.parameters() if id(p) in homes}
            self._of = {**self._of, part: tuple(mine.values())}
            self._hooks.append(part.register_forward_pre_hook(self._entered))

    def arm(self) -> None:
        super().arm()
        self._yet, self._squares = list(self._early), []
        self.slices.ahead = (
            self.run is not None and not self.slices.measures and not self.looked(self.run.step + 1)
        )
        self.slices.begin()

    def begin(self, turn: object) -> None:
        self.finish()
        super().begin(turn)  # type: ignore[arg-type]

    def _depart(self) -> None:
        """Hand over early buckets as they fill: their order of departure is the policy's affair."""
        for bucket in [waiting for waiting in self._yet if waiting.waiting == 0]:
            self._yet.remove(bucket)
            if self.slices.ahead:
                self._squares.append(_square(bucket.body))
            self.sync.grad_ready(bucket)

    def _local_squares(self) -> Tensor:
        """float64 [], of a step that runs ahead; zero of others, whose norm is known at once."""
        if not self.slices.ahead:
            return self.line.values.new_zeros(())
        return torch.stack([*self._squares, *(_square(bucket.body) for bucket in self._late)]).sum()

    def close(self, losses: Tensor | None = None, stop: bool = False) -> Verdict:
        verdict = super().close(losses, stop)
        if verdict is Verdict.REMOTE:
            self._left = {id(bucket) for bucket in (*self._early, *self._late)}
            self.forget()
        return verdict

    def numbers(self, measure: Measure) -> Numbers:
        """Of a step that runs ahead the norm is not known yet: NaN, or infinite if a gradient is not finite."""
        if not self._left:
            return super().numbers(measure)
        count = self.line.places.count
        *losses, squares, stop, lacks = self.line.values.tolist()
        self.drop_unused(lacks)
        norm = math.nan if math.isfinite(squares) else math.inf
        return Numbers(norm, math.fsum(losses[:count]), stop > 0)

    def _entered(self, part: nn.Module, _: object) -> None:
        """Before a part of the model computes."""
        if self._left:
            self._take(self.slices.land(self.slices.until(self._of[part])))

    def finish(self) -> None:
        """What is under way lands, and is taken. The ranks of `dp` need not call it together."""
        if self._left:
            everything = [bucket for bucket in (*self._early, *self._late) if id(bucket) in self._left]
            self._take(self.slices.land(self.slices.until(everything)))

    def abandon(self) -> None:
        """What is under way lands, and is forgotten: nothing was changed."""
        everything = [*self._early, *self._late]
        self.slices.land(self.slices.until(everything))
        self._left, self._norms = set(), {}

    @torch.no_grad()
    def _take(self, buckets: Sequence[Bucket]) -> None:
        """Step the parameters whose gradients have arrived."""
        if not buckets or self.run is None:
            return
        absent = {id(slot.master) for slot in self.slots if slot.name in self.unused}
        pairs = [
            (p, view)
            for bucket in buckets
            for p, view in zip(bucket.params, bucket.views, strict=True)
            if id(p) not in absent
        ]
        with self.run.recorder.span("optim"):
            for (p, view), norm in zip(pairs, torch._foreach_norm([view for _, view in pairs]), strict=True):
                p.grad, self._norms[id(p)] = view, norm
            self.run.update.optimizer.step()
            for p, _ in pairs:
                p.grad = None
        self._left -= {id(bucket) for bucket in buckets}
        if not self._left:
            squares = torch.stack(list(self._norms.values())).double().square_().tolist()
            self.norm_before, self._norms = math.sqrt(math.fsum(squares)), {}

    def release(self) -> None:
        self.finish()
        super().release()


def _square(x: Tensor) -> Tensor:
    """float64 []; of x in its own dtype, as norms are taken."""
    return torch.linalg.vector_norm(x).double().square()


@dataclass(kw_only=True)
class AheadUpdate(Update):
    """An update that may be made later, part by part: then it says at which rate."""

    by_parts: ClassVar[bool] = True
    gradients: AheadGradients

    def __call__(self, step: int, verdict: Verdict, numbers: Numbers) -> Report:
        before = self.gradients.norm_before
        says, self.gradients.norm_before = {} if before is None else {"grad_norm_before": before}, None
        if verdict is not Verdict.REMOTE:
            report = super().__call__(step, verdict, numbers)
            return replace(report, says={**report.says, **says})
        lr = self.rate(step)
        if bad := self.judge(step, verdict, numbers):
            self.gradients.abandon()
            finite = math.isfinite(numbers.loss) and not math.isinf(numbers.norm)
            numbers_of = step, numbers.loss, numbers.norm, lr, Verdict.DISCARD, numbers.stop, finite
            return Report(*numbers_of, bad=bad, says=says)
        set_rate(self.optimizer, lr)
        if numbers.stop:
            self.gradients.finish()
        return Report(step, numbers.loss, numbers.norm, lr, verdict, numbers.stop, says=says)


def parts_of(local: Local) -> list[nn.Module]:
    """Stem, blocks and head: each computes with its own parameters alone, so that a pipeline may be cut between."""
    return [
        part
        for stage in local.stages.values()
        for part in (getattr(stage, "stem", None), *stage.blocks.values(), getattr(stage, "head", None))
        if part is not None
    ]


def why_not_ahead(run: Run) -> str:
    """Why each step of this run has to wait for all slices before its update; "" where none has."""
    update, slots = run.update, [slot for slot in run.local.slots if slot.live.requires_grad]
    if update.after:
        return "routers, or running statistics of batch norms, change with the whole step"
    if update.max_norm:
        return "train.clip needs the norm of the whole gradient; --train.clip 0 is off"
    if not update.apart:
        return "the optimiser does not say that it steps each parameter by its own gradient alone"
    stepped = {id(p) for group in update.optimizer.param_groups for p in group["params"]}
    owners = [slot for slot in slots if not slot.alias]
    if any(slot.master is not slot.live or id(slot.master) not in stepped for slot in owners):
        return "parameters are rounded from masters, or stepped elsewhere"
    if any(
        module._compiled_call_impl is not None
        for stage in run.local.stages.values()
        for module in stage.modules()
    ):
        return "blocks are compiled"
    return ""


def run_ahead(run: Run, train: TrainConfig) -> str:
    """Let steps run ahead of their last slices where this run looks at no weights, if its policy is meant for that.
    Returns what there is to be said at the start, "" for nothing."""
    gradients = run.gradients
    if not isinstance(gradients, AheadGradients):
        return ""
    auto = "train.save_every = auto may save after any of them" if train.save_every == "auto" else ""
    if why := why_not_ahead(run) or auto:
        return f"sync={run.replica.plan.sync}: every update waits for all slices: {why}"
    plain = {part.name: getattr(run.update, part.name) for part in fields(run.update)}
    run.update = AheadUpdate(**plain, gradients=gradients)
    looks = drains(train)
    gradients.looked = lambda step: looks(step) or bool(train.guard and step % train.guard == 0)
    gradients.follow(run)
    return ""
