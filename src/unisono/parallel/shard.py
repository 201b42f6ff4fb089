"""ZeRO over the `shard` axis through FSDP2 (Rajbhandari et al., 2020; Zhao et al., 2023).

zero=1 shards the optimiser: gradients stay whole until the step's last backward. zero=2 also shards gradients: each
backward scatters them. zero=3 also shards parameters: they are gathered block by block, in forward and in backward.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from unisono.comm.device import is_apart
from unisono.comm.group import Group


class _FsdpAdapter:
    """What FSDP2 asks of any communication of ours."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ShardScatter(_FsdpAdapter):
    """FSDP2's reduce-scatter through our group: half of Gloo's bytes, summed in rank order, recorded.

    before(x): is shown each gradient before it leaves, and may change it.
    """

    def __init__(self, group: Group, before: Callable[[Tensor], object] = lambda x: None) -> None:
        super().__init__(group)
        self.before = before

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self.before(input_tensor)
        output_tensor.copy_(self.group.reduce_scatter(input_tensor))


class ShardGather(_FsdpAdapter):
    """FSDP2's all-gather through our group: both directions of a link at once, recorded. It is over on return."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.group.gather_into(output_tensor, input_tensor)


class Whole:
    """Nothing is sharded: the value that stands for `shard=1`."""

    def before_backward(self, last: bool) -> None:
        """A backward is about to begin; `last` if it is the step's last."""


class Sharded(Whole):
    """A stage whose parameters FSDP2 has sharded in place."""

    def __init__(
        self,
        stage: nn.Module,
        blocks: Iterable[nn.Module],
        group: Group,
        zero: int,
        each: bool = False,
        apart: set[nn.Parameter] | None = None,
    ) -> None:
        """apart: parameters that stay as they are."""
        device = next(stage.parameters()).device
        if group.pg is None:
            raise ValueError("a group of one shards nothing")
        mesh = DeviceMesh.from_group(group.pg, device.type, mesh_dim_names=("shard",))
        self._zero = zero
        self._each = each  # scatter the gradients of each backward, whatever the stage
        blocks = tuple(blocks)
        for module in (*blocks, stage):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=zero == 3 and module is not stage,
                ignored_params=apart,
            )
        if not isinstance(stage, FSDPModule):
            raise TypeError("fully_shard did not take the stage")
        if blocks and isinstance(blocks[0], FSDPModule):
            # What its backward asks for ahead of time would be the last block of another micro-batch's forward, which
            # is dropped unused when this backward ends. The stage itself is there.
            blocks[0].set_modules_to_backward_prefetch([stage])
        self._stage: FSDPModule = stage
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss is already weighted over the global batch
                module.set_force_sum_reduction_for_comms(True)
                if not is_apart(device):
                    module.set_custom_reduce_scatter(ShardScatter(group))  # type: ignore[arg-type]
                    module.set_custom_all_gather(ShardGather(group))  # type: ignore[arg-type]

    def before_backward(self, last: bool) -> None:
        if self._zero == 1 and not self._each:
            self._stage.set_requires_gradient_sync(last)
        if self._zero < 3:
            self._stage.set_reshard_after_backward(last)
