"""AdaScale (Johnson et al., "AdaScale SGD: A user-friendly algorithm for distributed training", ICML 2020).

With a batch S times as large, a step is worth r steps of the small batch, 1 ≤ r ≤ S: r is S where gradients are all
noise, 1 where they have none. The learning rate is r times that of the small batch, and the schedule goes on by r
steps. `train/step/adascale.py` measures r; the step itself is that of an optimiser inside.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.training import Count, Optimiser, Positive, Share
from unisono.train.optim.adamw import AdamW
from unisono.train.optim.sgd import Momentum
from unisono_contrib.config.sections.noise_scale import unmeasurable


class AdaScale(Momentum):
    """SGD with momentum, or AdamW, at the learning rate of a smaller batch times a gain that is measured."""

    name: ClassVar[str] = "adascale"
    by_shape: ClassVar[bool] = True
    apart: ClassVar[bool] = False  # the gain wants the whole gradient
    paced: ClassVar[bool] = True
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), description="of its AdamW: decay of the two moments"
    )
    eps: Positive = Field(default=1e-8, description="of its AdamW: added to the root of the squares")
    adascale_inner: Literal["sgd", "adamw"] = Field(
        default="sgd", description="adascale: the optimiser that steps"
    )
    adascale_batch: Count | None = Field(
        default=None,
        description="adascale: samples of the batch that lr and its schedule are meant for; absent: micro_batch",
    )
    adascale_steps: Count | None = Field(
        default=None, description="adascale: steps of that batch over which the schedule goes; absent: steps"
    )
    adascale_smoothing: Share = Field(
        default=0.95, description="adascale: decay of the exponential means of noise and signal"
    )

    @property
    def most_kept(self) -> int:
        return self.for_parameter("", ()).kept

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Optimiser:
        return AdamW(betas=self.betas, eps=self.eps) if self.adascale_inner == "adamw" else self.plain()

    def plain(self) -> Momentum:
        """Its SGD."""
        return Momentum(momentum=self.momentum)

    def problems(self, plan: Any, model: Any) -> Iterator[Problem]:
        policy = named("sync", plan.sync)
        if policy is not None and policy.leafwise:
            what = (
                f"optimizer=adascale sums squares as they come, so sync={plan.sync} cannot promise its bits"
            )
            yield Problem("P44", what, "plan.sync, train.optimizer", "sync=every_step")
        yield from unmeasurable(plan, "train.optimizer")
