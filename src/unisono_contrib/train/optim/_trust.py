"""Optimisers that scale the step of each weight matrix by a trust ratio of two norms, for large batches.

A trust ratio makes a step a share of the weights that it changes. So one learning rate suits all layers, also where it
is large (You et al., "Large batch training of convolutional networks", 2017).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.training import NotNegative, Optimiser


class Trusting(Optimiser, ABC):
    """A step in which each matrix is scaled by a ratio of norms of the whole of it, however ranks cut it. Biases and
    the weights of norms have none, and are stepped by `plain`."""

    norms: ClassVar[bool] = True
    by_shape: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    trust_clip: tuple[NotNegative, NotNegative] | None = Field(
        default=None, description="lars, lamb, lans: least and greatest trust ratio; [1, 1] turns it off"
    )
    adapt_vectors: bool = Field(
        default=False,
        description="lars, lamb, lans: a trust ratio for biases and norms too, not only matrices",
    )

    @abstractmethod
    def plain(self) -> Optimiser:
        """The same optimiser without a trust ratio."""

    @property
    def most_kept(self) -> int:
        return max(self.kept, self.plain().kept)

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Optimiser:
        return self if len(shape) >= 2 or self.adapt_vectors else self.plain()

    def problems(self, plan: Any, model: Any) -> Iterator[Problem]:
        where = "train.optimizer"
        if self.trust_clip and self.trust_clip[0] > self.trust_clip[1]:
            low, high = self.trust_clip
            what = f"train.trust_clip: its least ratio {low:g} is above its greatest {high:g}"
            yield Problem("C06", what, "train.trust_clip", f"[{high:g}, {low:g}]")
        schedule = named("schedule", plan.schedule)
        if plan.pp > 1 and schedule is not None and not schedule.flushed:
            apart = f"under schedule={plan.schedule} each steps alone"
            what = f"optimizer={self.name} needs norms over all stages, and {apart}"
            yield Problem(
                "P28", what, f"plan.schedule, {where}", f"schedule=1f1b, or {where} {self.plain().name}"
            )
        if plan.arithmetic.stochastic:
            what = f"optimizer={self.name} measures masters, and precision={plan.text('precision')} has none"
            yield Problem("P28", what, f"plan.precision, {where}", "precision=bf16")
