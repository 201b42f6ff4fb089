"""Lock-step with one order of summation: bit-identical weights for any number of replicas, shards and stages.

The gradients of the global batch's leaves are summed along one binary tree over the leaves (`comm/tree.py`). A rank
adds its own leaves along its part of the tree; replicas exchange parts and add them along the rest of it.

Fidelity: EXACT towards one process in this mode, over dp, shard and pp.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.comm.tree import tree_sum
from unisono.plan.grammar import member
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work
from unisono.sync import Policy, Sync, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from unisono.comm.bucket import Bucket
    from unisono.comm.group import Group, Pending


class Canonical(Policy):
    """Every step, every sum in one order: the same bits for any number of replicas, shards and stages."""

    name = "canonical"
    fidelity = Fidelity.EXACT
    leafwise = True
    alone = True

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        """One tree over the leaves of a step, of which ranks compute whole branches: those have 2^k leaves."""
        if plan.replicas == 1:
            return
        codec = member("codec", plan.codec)
        if codec is not None and codec.fidelity is not Fidelity.EXACT:
            what = f"sync=canonical adds up every bit, and codec={plan.codec} does not send them"
            yield Problem("P21", what, "plan.codec, plan.sync", "codec=plain, or sync=every_step")
        for key, size in (("micros", batch.micros), ("shard", plan.shard)):
            if size & (size - 1):
                what = f"sync=canonical needs a power of two micro-batches and shards a rank, {key} is {size}"
                fix = f"{key}={1 << size.bit_length() - 1} with another micro_batch, or sync=every_step; dp may be any"
                yield Problem("P18", what, f"plan.{key}, plan.sync", fix)

    def work(self, gradient_bytes: int, dp: int) -> Work:
        part = gradient_bytes // dp
        return Work((Call("dp", "all_to_all", part * (dp - 1)), Call("dp", "all_gather", part * (dp - 1))))

    def bind(self, slots: Sequence[Any], group: "Group", codec: Any) -> "CanonicalSync":
        return CanonicalSync(group)


@dataclass(slots=True)
class _Flight:
    """A bucket on its way: each rank collects everybody's share of its part."""

    bucket: "Bucket"
    parts: "Tensor"  # [ranks, part]
    pending: "Pending"


class CanonicalSync(Sync):
    """Direct exchange: each rank adds one part of every bucket, in the tree's order, and hands the sum out."""

    def __init__(self, dp: "Group") -> None:
        self.dp = dp
        self._flights: list[_Flight] = []

    def weigh(self, count: float) -> float:
        return 1.0 / (count * self.dp.size)

    def grad_ready(self, bucket: "Bucket") -> None:
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
