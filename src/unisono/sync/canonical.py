"""Lock-step with one order of summation: bit-identical weights for any number of replicas, shards and stages.

The gradients of the global batch's leaves are summed along one binary tree over the leaves (`comm/tree.py`). A rank
adds its own leaves along its part of the tree; replicas exchange parts and add them along the rest of it.

Fidelity: EXACT towards one process in this mode, over dp, shard and pp.
"""

from dataclasses import dataclass

from torch import Tensor

from unisono.comm.bucket import Bucket
from unisono.comm.group import Group, Pending
from unisono.comm.tree import tree_sum
from unisono.spec.fidelity import Fidelity
from unisono.sync import Sync, Verdict

FIDELITY = Fidelity.EXACT


@dataclass(slots=True)
class _Flight:
    """A bucket on its way: each rank collects everybody's share of its part."""

    bucket: Bucket
    parts: Tensor  # [ranks, part]
    pending: Pending


class Canonical(Sync):
    """Direct exchange: each rank adds one part of every bucket, in the tree's order, and hands the sum out."""

    def __init__(self, dp: Group) -> None:
        self.dp = dp
        self._flights: list[_Flight] = []

    def weigh(self, count: int) -> float:
        return 1.0 / (count * self.dp.size)

    def grad_ready(self, bucket: Bucket) -> None:
        if self.dp.size > 1:
            self._flights.append(_Flight(bucket, *self.dp.start_exchange(bucket.flat)))

    def settle(self) -> Verdict:
        if not self._flights:
            return Verdict.APPLY
        with self.dp.recorder.span("comm", axis="dp", op="exchange", exposed=True):
            gathering = []
            for flight in self._flights:
                flight.pending.wait()
                own = tree_sum(flight.parts.unbind(0))
                gathering.append((own, self.dp.start_all_gather(flight.bucket.flat, own)))
            for _, pending in gathering:
                pending.wait()
        self._flights.clear()
        return Verdict.APPLY

    def after_update(self, step: int) -> None:
        return None
