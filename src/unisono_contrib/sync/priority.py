"""Lock-step in slices: what the next forward needs first overtakes what it needs later.

Backward finishes the last layer first, forward needs the first layer first. So gradients travel in slices. On a link
that is busy, a slice of an early layer departs before those of later layers that wait. The update of a layer is made
when its slices are there, and the next forward waits layer by layer (Jayarajan et al., "Priority-based parameter
propagation for distributed DNN training", 2019; Peng et al., "A generic communication scheduler for distributed DNN
training acceleration", 2019).

Fidelity: ROUNDING, as `every_step`: slices are cut elsewhere than buckets.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from unisono.plan.grammar import member
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work
from unisono.sync import Policy

if TYPE_CHECKING:
    from unisono.codecs import Coder
    from unisono.comm.group import Group
    from unisono_contrib.sync._priority import PrioritySync


class Priority(Policy):
    """Every step, the sum of all gradients in slices: those that the next forward needs first overtake the others."""

    name = "priority"
    fidelity = Fidelity.ROUNDING

    slice: float = Field(default=1.0, gt=0, description="MiB of gradients that travel together")
    window: int = Field(
        default=2, ge=1, description="slices under way at once during backward; fewer are overtaken sooner"
    )

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        """An early layer can be updated by itself where a rank holds it whole and nothing else waits for it."""
        for key in ("shard", "pp", "cp", "tp", "ep"):
            if (ranks := getattr(plan, key)) > 1:
                what = (
                    f"sync={self.name} updates layer by layer, of what a rank holds whole; {key} is {ranks}"
                )
                yield Problem("P27", what, f"plan.sync, plan.{key}", f"{key}=1, or sync=every_step")
        if plan.precision == "fp16":
            what = f"sync={self.name}: under fp16 no layer is updated before all gradients are known to be finite"
            yield Problem("P27", what, "plan.sync, plan.precision", "precision=bf16, or sync=every_step")
        if plan.offload != "none":
            what = f"sync={self.name} updates layers while forward goes on, offload={plan.offload} moves them then"
            yield Problem("P27", what, "plan.sync, plan.offload", "offload=none, or sync=every_step")
        codec = member("codec", plan.codec)
        if codec is not None and not codec.elementwise:
            what = f"sync={self.name} cuts gradients anywhere, codec={plan.codec} takes several elements together"
            yield Problem("P21", what, "plan.codec, plan.sync", "codec=plain or cast, or sync=every_step")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        return Work((Call("dp", "all_reduce", 2 * gradient_bytes * (dp - 1) // dp),))

    def bind(self, slots: Sequence[Any], group: "Group", codec: "Coder") -> "PrioritySync":
        from unisono_contrib.sync._priority import PrioritySync

        return PrioritySync(group, codec, max(1, int(self.slice * 2**20)), self.window)
