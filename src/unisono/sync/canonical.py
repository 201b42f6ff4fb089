"""Lock-step with one order of summation: bit-identical weights for any number of replicas, shards and stages.

The gradients of the global batch's leaves are summed along one binary tree over the leaves (`comm/tree.py`). A rank
adds its own leaves along its part of the tree; replicas exchange parts and add them along the rest of it.

Inside a layer `tp` and `cp` cut sums. `canonical:shards=4` deals every width, the heads, the vocabulary and the
positions as 4 virtual shards (`parallel/virtual/`), so that these sums keep one order too.

Fidelity: EXACT towards one process in this mode, over dp, shard and pp; with shards over tp and cp too.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from unisono.codecs import BucketMemory, Coder, Deal, Exchange, Gather
from unisono.comm.tree import branch_sum, tree_sum
from unisono.plan.grammar import member
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work
from unisono.sync._leaves import AssigningPolicy
from unisono.sync.every_step import EveryStepSync

if TYPE_CHECKING:
    from torch import Size, Tensor

    from unisono.comm.group import Group


def _below(size: int) -> int:
    """The greatest power of two up to `size`."""
    return 1 << size.bit_length() - 1


def _dealt(shard: int, batch: Any) -> str:
    """Ways to deal this global batch so that each data rank has 2^k micro-batches: larger ones, or another dp."""
    share = batch.micro_batch * batch.micros
    micros = next(
        m for k in range(_below(batch.micros).bit_length(), 0, -1) if share % (m := 1 << k - 1) == 0
    )
    size = share // micros
    numbers = [dp for dp in range(1, batch.leaves // shard + 1) if not batch.leaves % (dp * shard)]
    fit = [dp for dp in numbers if _below(leaves := batch.leaves // (dp * shard)) == leaves]
    other = min(fit, key=lambda dp: abs(dp * shard - batch.replicas), default=0)
    return f"--train.micro_batch {size} (micros={micros})" + (f", or dp={other}" if other else "")


class Canonical(AssigningPolicy):
    """Every step, every sum in one order: the same bits for any number of replicas, shards and stages."""

    name = "canonical"
    fidelity = Fidelity.EXACT
    leafwise = True
    alone = True

    shards: int = Field(
        default=1, ge=1, description="virtual shards of each layer, 2^k; the same bits under tp and cp"
    )

    @field_validator("shards")
    @classmethod
    def _paired(cls, shards: int) -> int:
        if shards & (shards - 1):
            raise ValueError("virtual shards are added up in pairs: a power of two")
        return shards

    @property
    def virtual(self) -> int:
        return self.shards

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        """One tree over the leaves of a step, of which ranks compute whole branches: those have 2^k leaves."""
        yield from super().problems(plan, batch)
        schedule = member("schedule", plan.schedule) if plan.pp > 1 else None
        for key in ("tp", "cp"):
            ranks = getattr(plan, key)
            if self.shards > 1 and self.shards % ranks:
                what = f"{self.shards} virtual shards cannot be split evenly over {key}={ranks}"
                more = 1 << (ranks - 1).bit_length()
                fix = f"{key}={_below(min(ranks, self.shards))}, or sync=canonical:shards={more}"
                yield Problem("P18", what, f"plan.sync, plan.{key}", fix)
        if plan.replicas == 1 and (schedule is None or schedule.chains == 1):
            return
        codec = member("codec", plan.codec)
        if codec is not None and codec.fidelity is not Fidelity.EXACT:
            what = f"sync=canonical adds up every bit, and codec={plan.codec} does not send them"
            yield Problem("P21", what, "plan.codec, plan.sync", "codec=plain, or sync=every_step")
        for key, size in (("micros", batch.micros), ("shard", plan.shard)):
            if size & (size - 1):
                what = f"sync=canonical needs a power of two micro-batches and shards a rank, {key} is {size}"
                fix = f"shard={_below(size)}" if key == "shard" else _dealt(plan.shard, batch)
                yield Problem("P18", what, f"plan.{key}, plan.sync", f"{fix}, or sync=every_step")

    def work(self, gradient_bytes: int, dp: int) -> Work:
        part = gradient_bytes // dp
        return Work((Call("dp", "all_to_all", part * (dp - 1)), Call("dp", "all_gather", part * (dp - 1))))

    def bind(self, slots: Sequence[Any], group: "Group", codec: Any) -> "CanonicalSync":
        return CanonicalSync(group, TreeCoder())


class TreeCoder(Coder):
    """Direct exchange: each rank adds one part of a bucket, in the tree's order, and hands the sum out. branches: of
    the tree over a step's micro-batches, one for each replica; () where they are equal, in the order of replicas."""

    branches: Sequence[tuple[int, int]] = ()

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        parts = yield Deal(grad)
        each = parts.unbind(0)
        if self.branches:
            whole = max(high for _, high in self.branches)
            yield Gather(branch_sum(dict(zip(self.branches, each, strict=True)), 0, whole), grad)
        else:
            yield Gather(tree_sum(each), grad)
        return grad


class CanonicalSync(EveryStepSync):
    """Lock-step whose sums know which branch of the tree each replica has."""

    def __init__(self, dp: "Group", coder: TreeCoder) -> None:
        super().__init__(dp, coder)
        self._coder = coder

    def assigned(self, stretches: Sequence[range], shards: int) -> None:
        branches = [(leaves.start // shards, leaves.stop // shards) for leaves in stretches]
        equal = len({high - low for low, high in branches}) == 1 and branches == sorted(branches)
        self._coder.branches = () if equal else branches
