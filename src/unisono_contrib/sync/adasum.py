"""Adasum: of what replicas agree on, their gradients give the mean; of what is orthogonal, the sum (Maleki et al.,
"Scaling distributed training with adaptive summation", 2021, arXiv 2006.02924).

Two gradients a and b of one tensor merge to

    (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b,

replicas pair by pair along a binary tree: (0, 1), (2, 3), ..., then the pairs; one that is left over waits for the next
level. a and b are means over each replica's samples, so the learning rate is that of one replica's batch.

Whatever the tree, the result is a weighted sum of the replicas' gradients, and the weights follow from their dot
products. So each rank is given one part of every replica's gradient, all dot products are added up in one sum over all
ranks, in float64, also over the axes that cut a tensor, and the merged parts are gathered: as many bytes as a sum.

Fidelity: LOSSY. Identities: replicas that have the same samples are one replica, with any optimiser.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work
from unisono.sync import Identity, Policy, Sync
from unisono_contrib.sync._local import plain_problems

if TYPE_CHECKING:
    from unisono.comm.group import Group


class Adasum(Policy):
    """Every step, gradients merge tensor by tensor: the mean of equal ones, the sum of orthogonal ones."""

    name = "adasum"
    fidelity = Fidelity.LOSSY
    identities = (
        Identity("adasum", "every_step", alike=True),
        Identity("adasum", "every_step", alike=True, replicas=4),
    )

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from plain_problems(plan, "gradients are merged by their dot products, whole")
        schedule = named("schedule", plan.schedule)
        if plan.pp > 1 and schedule is not None and (not schedule.flushed or schedule.chains > 1):
            what = (
                f"sync={plan.sync} merges whole gradients, schedule={plan.schedule} has parts of them apart"
            )
            yield Problem("P16", what, "plan.sync, plan.schedule", "schedule=1f1b")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        part = gradient_bytes // dp
        return Work((Call("dp", "all_to_all", part * (dp - 1)), Call("dp", "all_gather", part * (dp - 1))))

    def bind(self, slots: Sequence[Any], group: "Group", codec: Any) -> Sync:
        from unisono_contrib.sync._adasum import AdasumSync

        return AdasumSync(slots, group)
