"""Replicas meet in every k-th step: gradients of k steps are added up where they are made, and meet once.

The update that follows is that of one batch, k times as large: with the mean of k steps' gradients, at the learning
rate of the k-th step. The steps between change no weight. So it sends a k-th of the bytes, and changes what a run
means: k steps make one update. One device can do the same, and that is what fidelity is told towards. (Accumulation
over micro-batches inside a step, `micros`, changes nothing; this is for links on which even that is too often.)

With `most` the period follows the links: after each meeting ranks agree on the shortest one in which what showed of
communication is a tenth of computing. All take it alike, and a checkpoint keeps it.

Fidelity: ROUNDING towards one device with the same policy and the same periods, as far as the codec loses nothing.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Durations, Work
from unisono.sync import Policy, Sync, Verdict
from unisono.sync.every_step import EveryStepSync
from unisono_contrib.sync._local import pace_of_rounds

if TYPE_CHECKING:
    from torch import Tensor

    from unisono.codecs import Coder
    from unisono.comm.bucket import Bucket
    from unisono.comm.group import Group

COUNTER, PERIOD = "held_steps", "period_steps"
SHOWS = 0.1
"""Of the computing of a period, what communication may show."""


def period_for(shown: float, computing: float, least: int, most: int) -> int:
    """The shortest period in which a meeting that shows `shown` seconds is at most `SHOWS` of computing, which takes
    `computing` seconds a step."""
    wanted = math.ceil(shown / (SHOWS * computing)) if computing > 0.0 else least
    return min(max(wanted, least), most)


class EveryPeriod(Policy):
    """Every k-th step, the sum of the gradients of k steps; with k=1 every step."""

    name = "period"
    main: ClassVar[str] = "steps"
    fidelity = Fidelity.ROUNDING
    alone = True

    steps: int = Field(default=1, ge=1, description="from one update to the next; replicas meet once in them")
    most: int = Field(default=1, ge=1, description="steps that a period may grow to where links are slow")

    @property
    def rhythm(self) -> int:
        return max(self.steps, self.most)

    def steady(self, text: str) -> str:
        return f"{self.name}:{self.steps}" if self.most > self.steps else text

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        what = f"sync={plan.sync} keeps gradients of several steps"
        if self.rhythm > 1 and plan.precision == "fp16":
            why = f"{what}, whose scale precision=fp16 changes between them"
            yield Problem("P16", why, "plan.sync, plan.precision", "precision=bf16, or sync=every_step")

    def pace(self, durations: Durations) -> float:
        return pace_of_rounds(durations, self.steps)

    def work(self, gradient_bytes: int, dp: int) -> Work:
        nbytes = 2 * gradient_bytes * (dp - 1) // dp
        kept = gradient_bytes + 8 * (1 + (self.most > self.steps)) if self.rhythm > 1 else 0
        # Where the period may grow this is the most.
        return Work((Call("dp", "all_reduce", nbytes, 1.0 / self.steps),), kept)

    def bind(self, slots: Sequence[Any], group: "Group", codec: "Coder") -> Sync:
        inner = EveryStepSync(group, codec, slots)
        return inner if self.rhythm == 1 else PeriodSync(inner, slots, self.steps, self.rhythm)


class PeriodSync(Sync):
    """Adds up steps that do not meet, and brings the sum into the one that does. State: the sum that this replica
    holds, by `PARAMETER/held`, shaped like its gradient."""

    shares = True

    def __init__(self, inner: EveryStepSync, slots: Sequence[Any], steps: int, most: int) -> None:
        import torch

        from unisono.sync._slots import learning_dense
        from unisono_contrib.sync._presence import GradientPresence

        self.inner, self.dp, self.cap, self.least, self.most = inner, inner.dp, inner.cap, steps, most
        self.sliced, self.kept = inner.sliced, inner.kept
        self._slots = learning_dense(slots, "period")
        self._held = {
            slot.name: torch.zeros_like(slot.master, dtype=slot.master.grad_dtype) for slot in self._slots
        }
        self._names = {id(p): slot.name for slot in self._slots for p in (slot.live, slot.master)}
        self._count = torch.zeros((), dtype=torch.int64)  # steps that are held
        self._period = torch.tensor(steps)
        self._world: Group | None = None
        self._presence, self._there = GradientPresence(), frozenset[str]()
        self._shown, self._computed, self._since, self._said = 0.0, 0.0, 0, 0
        # Gradients of a step that does not meet, until it is known to count.
        self._new: list[tuple[str, Tensor]] = []
        self._adds = False

    def among(
        self, world: "Group", replica: "Group | None" = None, counted: frozenset[str] = frozenset()
    ) -> None:
        import torch

        from unisono_contrib.sync._presence import GradientPresence

        self._world = world
        device = self._slots[0].master.device if self._slots else None
        self._presence = GradientPresence.among(self._held, replica, torch.empty(0, device=device))

    @property
    def steps(self) -> int:
        """The number of steps of the period that is under way."""
        return int(self._period)

    @property
    def is_due(self) -> bool:
        """Whether replicas meet in this step."""
        return int(self._count) == self.steps - 1

    def grad_ready(self, bucket: "Bucket") -> None:
        if not self.is_due:
            return
        for p, view in zip(bucket.params, bucket.views, strict=True):
            view.add_(self._held[self._names[id(p)]].view_as(view))
        bucket.flat.mul_(1.0 / self.steps)
        self.inner.grad_ready(bucket)

    def lacking(self, absent: "Sequence[Any]") -> "Sequence[Any]":
        if not self.is_due:
            return absent
        self._there = self._presence.nonzero(self._held)
        return [p for p in absent if self._names[id(p)] not in self._there]

    def settle(self) -> Verdict:
        import torch

        with torch.no_grad():
            if self.is_due:
                self._bring() if self.dp.size == 1 else None
                self._count.zero_()
                for held in self._held.values():
                    held.zero_()
                begun = time.perf_counter()
                verdict = self.inner.settle()
                self._shown = time.perf_counter() - begun
                return verdict
            for slot in self._slots:
                if (grad := slot.master.grad) is not None:
                    self._new.append((slot.name, grad))
                    slot.master.grad = torch.zeros_like(grad)
            self._adds = True
            return Verdict.HOLD

    def _bring(self) -> None:
        """The sum into the gradients, where nothing departs."""
        for slot in self._slots:
            held = self._held[slot.name]
            if slot.master.grad is None:
                slot.master.grad = held.clone() if slot.name in self._there else None
            else:
                slot.master.grad.add_(held)
            if slot.master.grad is not None:
                slot.master.grad.mul_(1.0 / self.steps)

    def after_update(self, step: int) -> None:
        import torch

        self.inner.after_update(step)
        if self._adds:
            with torch.no_grad():
                for name, grad in self._new:
                    self._held[name].add_(grad)
            self._count += 1
        self._adds, self._new = False, []
        self._since += 1
        if not int(self._count) and self._world is not None and self.most > self.least:
            self._period.fill_(period_for(*self._times(self._world), self.least, self.most))

    def _times(self, world: "Group") -> tuple[float, float]:
        """Seconds that this meeting showed, and that a step since the last one computed: of the rank that waited least
        for others, and of the quickest. Every rank of `world` calls it, or it hangs."""
        import torch

        totals = self.dp.recorder.totals()
        computed = totals.get("forward", 0.0) + totals.get("backward", 0.0)
        times = [self._shown, (computed - self._computed) / max(1, self._since)]
        self._computed, self._since = computed, 0
        shown, computing = world.all_gather(torch.tensor([times], dtype=torch.float64)).amin(0).tolist()
        return shown, computing

    def undone(self) -> None:
        """A step that does not meet adds nothing, and the period is one longer; of one that meets, all are given up."""
        if not self._adds:
            self.inner.undone()
        self._adds = False

    def metrics(self) -> "Mapping[str, Any]":
        grown = self.steps != self._said and self.most > self.least
        self._said = self.steps
        return {**self.inner.metrics(), **({"period": self.steps} if grown else {})}

    def is_private(self, key: str) -> bool:
        return key.endswith("/held") or self.inner.is_private(key)

    def state(self) -> "Mapping[str, Tensor]":
        held = {f"{name}/held": x for name, x in self._held.items()}
        grows = {PERIOD: self._period} if self.most > self.least else {}
        return {**self.inner.state(), **held, **grows, COUNTER: self._count}
