"""How the gradients of one prepared model become those of the global batch.

Each rank's backward leaves the gradient of a mean over its own samples. Weighted by its share and averaged over the
data ranks, that is the gradient of the mean over the global batch. It is there when `backward` returns: buckets
leave while backward runs, and the last act of the backward waits for them. So whatever reads gradients between
`backward` and `step` reads the ones that a single device would have.

Averaging again changes nothing: a gradient that is the same on all ranks is its own average. So several backwards in a
step, with or without an exchange after each, add up to the same.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unisono.comm.bucket import Bucket, Buckets
from unisono.comm.group import Group
from unisono.library.deal import BatchWeight
from unisono.parallel.params import Slot
from unisono.sync.every_step import EveryStepSync


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Have `act` called when the backward that is running has done everything else."""
    Variable._execution_engine.queue_callback(act)  # type: ignore[attr-defined]


class Gradients:
    """Gradients of one model on one rank, which meet on `dp`: a group of the model's own, since which of several models
    is ready first may differ from rank to rank. `unused` names the parameters that no rank's last backward reached."""

    def __init__(self, slots: Sequence[Slot], dp: Group, shard: Group, share: BatchWeight) -> None:
        self.slots = [slot for slot in slots if slot.live.requires_grad]
        self.unused: tuple[str, ...] = ()
        self._share, self._dp, self._shard = share, dp, shard
        self._sync = EveryStepSync(dp)
        self._sharded = shard.size > 1
        masters = [slot.master for slot in self.slots]
        early, late = ((), [masters]) if self._sharded else (masters, ())
        # The tail says, for every parameter, on how many ranks backward reached it.
        self._buckets = Buckets(early, late, len(masters), over=dp) if dp.size > 1 else None
        self._running = False
        self._holding = False
        self._behind = False
        if self._sharded:
            return
        for slot in self.slots if self._buckets is not None else ():
            slot.live.register_hook(self._arrives)

    def hold(self, holding: bool) -> bool:
        """Switch whether backwards keep their gradients to themselves; returns what was."""
        was, self._holding = self._holding, holding
        return was

    def scatter_through(self, model: nn.Module) -> None:
        """Weigh what FSDP2 sends: its gradients never pass the parameters' own hooks."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_Weighed(self._shard, self._share, self._begin))  # type: ignore[arg-type]

    def catch_up(self) -> None:
        """Let gradients meet that were held back; nothing if they have met."""
        if self._behind:
            if self._buckets is not None and not self._sharded:
                self._depart()
            self._meet()

    def _arrives(self, grad: Tensor) -> Tensor | None:
        """One parameter's fresh gradient, before it is added to what is there."""
        self._begin()
        ratio = self._share.ratio
        if ratio == 1.0:
            return None
        return grad * ratio if ratio else torch.zeros_like(grad)  # 0 x inf is not 0

    def _begin(self) -> None:
        """The first gradient of a backward is here."""
        if self._running or self._buckets is None:
            return
        self._running = True
        if self._holding:
            self._behind = True
        elif not self._sharded:
            self._depart()
        at_end_of_backward(self._end)

    def _depart(self) -> None:
        if self._buckets is not None and self._buckets.tail is not None:
            self._buckets.tail.fill_(1.0)
            self._buckets.arm(self._send)

    def _send(self, bucket: Bucket) -> None:
        bucket.body.mul_(1.0 / self._dp.size)
        self._sync.grad_ready(bucket)

    def _end(self) -> None:
        # FSDP2 has queued what it does at the end as well, perhaps behind this.
        at_end_of_backward(self._ended)

    def _ended(self) -> None:
        self._running = False
        if not self._holding:
            self._meet()

    @torch.no_grad()
    def _meet(self) -> None:
        buckets, self._behind = self._buckets, False
        if buckets is None or buckets.tail is None:
            return
        missing = [i for i, slot in enumerate(self.slots) if slot.live.grad is None]
        if self._sharded:
            for slot in self.slots:
                slot.take_gradient()
            buckets.tail.fill_(1.0)
        if missing:
            # Their bucket has not left, and the tail travels with the last one: it is still here.
            buckets.tail[missing] = 0.0
        buckets.finish()
        for group in buckets.late:
            for bucket in group:
                bucket.fill()
                self._send(bucket)
        self._sync.settle()
        nowhere = {
            i for i, reached in zip(missing, buckets.tail[missing].tolist(), strict=True) if not reached
        }
        self._restore(nowhere)
        self.unused = tuple(self.slots[i].name for i in sorted(nowhere))

    def _restore(self, nowhere: set[int]) -> None:
        """Gradients back where the optimiser looks for them; none where no rank has one, as on one device."""
        for i, slot in enumerate(self.slots):
            if i in nowhere:
                slot.drop_gradient()
            elif slot.master is not slot.live and slot.master.grad is not None:
                if slot.live.grad is None:
                    slot.live.grad = torch.zeros_like(slot.live)
                _local(slot.live.grad).copy_(slot.master.grad)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class _Weighed:
    """FSDP2's reduce-scatter: this rank's weight applied, then the sum over the group."""

    def __init__(self, group: Group, share: BatchWeight, begin: Callable[[], None]) -> None:
        self._group, self._share, self._begin = group, share, begin

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._begin()
        ratio = self._share.ratio
        if ratio:
            input_tensor.mul_(ratio / self._group.size)
        else:
            input_tensor.zero_()
        output_tensor.copy_(self._group.reduce_scatter(input_tensor))
