"""ZeRO over the `shard` axis through FSDP2 (Rajbhandari et al., 2020; Zhao et al., 2023).

zero=1 shards the optimiser: gradients stay whole until the step's last backward; a stage that is small travels in one
piece then. zero=2 also shards gradients: each backward scatters them, block by block. zero=3 also shards parameters:
they are gathered block by block, in forward and in backward.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unisono.comm.device import sharded_as
from unisono.comm.flight import Flight
from unisono.comm.group import Done, Group, Pending
from unisono.comm.tree import tree_sum
from unisono.parallel.wires import EightBits, segment_of
from unisono.plan.options import Wires

AT_ONCE = 25 << 20  # bytes of weights up to which a stage under zero=1 is one piece


class _FsdpAdapter:
    """What FSDP2 asks of any communication of ours."""

    device: torch.device | None = None  # where parameters are, if elsewhere than FSDP2 thinks

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of one dimension, which is all that FSDP2 asks for."""
        like = torch.empty(0, dtype=dtype, device=self.device or device)
        op, algorithm = self._next(), self.group.algorithm
        return algorithm.lend(op, prod(size), like) if op and algorithm is not None else like.new_empty(*size)

    def _next(self) -> str:
        """The operation whose input or output is asked for; "" where memory of this rank alone is meant."""
        return ""


class ShardScatter(_FsdpAdapter):
    """FSDP2's reduce-scatter through our group: half of Gloo's bytes, summed in rank order, recorded. On one host
    gradients are put where all ranks see them.

    before(x): is shown each gradient before it leaves, and may change it. wire: in which gradients travel, if not as
    they are. What lacks a gradient is left out of a buffer, which then travels as it is.
    """

    def __init__(
        self,
        group: Group,
        before: Callable[[Tensor], object] = lambda x: None,
        wire: EightBits | None = None,
    ) -> None:
        super().__init__(group)
        self.before, self.wire, self._begun = before, wire, False

    def _next(self) -> str:
        """FSDP2 asks for the input first. Then it asks for the output, which becomes the gradient and stays."""
        self._begun = not self._begun
        return "reduce_scatter" if self._begun and self.wire is None else ""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self._begun = False
        self.before(input_tensor)
        x = input_tensor.view(self.group.size, -1)
        if self.wire is None or self.wire.numel != x.shape[1]:
            self.group.reduce_scatter(input_tensor, output_tensor)
            return
        code, pending = self.group.start_exchange(self.wire.encode(x).view(-1))
        with self.group.recorder.span("comm", axis=self.group.axis, op="all_to_all", exposed=True):
            pending.wait()
        output_tensor.copy_(tree_sum(self.wire.decode(code, x.dtype).unbind(0)))


class ShardGather(_FsdpAdapter):
    """FSDP2's all-gather through our group: both directions of a link at once, recorded. On one host what is gathered
    lies where all ranks see it, once for all of them.

    wire: in which parameters travel, if not as they are. later: it is over when what it returns has been waited for;
    else on return.
    """

    def __init__(self, group: Group, wire: EightBits | None = None, later: bool = False) -> None:
        super().__init__(group)
        self.wire, self.later = wire, later

    def _next(self) -> str:
        return "all_gather" if self.wire is None else ""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        begin, wire = self.group.start_all_gather if self.later else self._gather, self.wire
        if wire is None:
            pending = begin(output_tensor, input_tensor)
            return self._under_way(pending, lambda: None)
        encoded = wire.encode(input_tensor.view(1, -1)).view(-1)
        code = encoded.new_empty(self.group.size * len(encoded))
        out = output_tensor.view(self.group.size, -1)
        pending = begin(code, encoded)
        return self._under_way(pending, lambda: out.copy_(wire.decode(code.view(len(out), -1), out.dtype)))

    def _gather(self, out: Tensor, part: Tensor) -> Pending:
        self.group.gather_into(out, part)
        return Done()

    def _under_way(self, pending: Pending, arrived: Callable[[], object]) -> dist.Work | None:
        if self.later:
            return UnderWay(self.group, pending, arrived)
        arrived()
        return None


class UnderWay(dist.Work):
    """A gather, from its departure on. arrived() is called once, by whoever waits first."""

    def __init__(self, group: Group, pending: Pending, arrived: Callable[[], object]) -> None:
        super().__init__()
        self._flight, self._arrived, self._over = Flight(group, "all_gather", pending), arrived, False

    def wait(self, timeout: object = None) -> bool:
        if not self._over:
            self._flight.land()
            with torch.no_grad():
                self._arrived()
            self._over = True
        return True


def placed(adapter: _FsdpAdapter, device: torch.device) -> Any:
    """Return this adapter itself, for parameters on `device`."""
    adapter.device = device
    return adapter


class Whole:
    """Nothing is sharded: the value that stands for `shard=1`."""

    def before_backward(self, last: bool) -> None:
        """A backward is about to begin; `last` if it is the step's last."""


class Sharded(Whole):
    """A stage whose parameters FSDP2 has sharded in place. narrow: bf16 ones are gathered, of masters that stay."""

    def __init__(
        self,
        stage: nn.Module,
        blocks: Iterable[nn.Module],
        group: Group,
        zero: int,
        each: bool = False,
        apart: set[nn.Parameter] | None = None,
        wires: Wires = Wires(),
        narrow: bool = False,
        zeros: Mapping[nn.Module, int] = MappingProxyType({}),
        device: torch.device | None = None,
    ) -> None:
        """apart: parameters that stay as they are. zeros: of blocks that are dealt otherwise than `zero` says. device:
        where parameters are, or will be."""
        device = device or next(stage.parameters()).device
        if group.pg is None:
            raise ValueError("a group of one shards nothing")
        kind, ours = sharded_as(device)
        mesh = DeviceMesh.from_group(group.pg, kind, mesh_dim_names=("shard",))
        self._each = each  # scatter the gradients of each backward, whatever the stage
        # Its gradients are there together in any case, and each piece costs collectives, hooks and waits of its own.
        params = (p for p in stage.parameters() if p not in (apart or ()))
        small = sum(p.numel() * p.element_size() for p in params) <= AT_ONCE
        alike = all(mode == 1 for mode in (zero, *zeros.values()))
        blocks = () if alike and small else tuple(blocks)
        forms: dict[nn.Module, tuple[EightBits, EightBits]] = {}
        policy = _policy_of(narrow)
        for module in (*blocks, stage):
            forms[module] = _wires_of(module, group.size, apart or set())
            again = zeros.get(module, zero) == 3 and module is not stage
            fully_shard(
                module, mesh=mesh, reshard_after_forward=again, ignored_params=apart, mp_policy=policy
            )
        if not isinstance(stage, FSDPModule):
            raise TypeError("fully_shard did not take the stage")
        if blocks and isinstance(blocks[0], FSDPModule):
            # What its backward asks for ahead of time would be the last block of another micro-batch's forward, which
            # is dropped unused when this backward ends. The stage itself is there.
            blocks[0].set_modules_to_backward_prefetch([stage])
        self._zeros: list[tuple[FSDPModule, int]] = []
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                self._zeros.append((module, zeros.get(module, zero)))
                _keep_wide(module, policy.reduce_dtype)
                module.set_gradient_divide_factor(1.0)  # the loss is already weighted over the global batch
                module.set_force_sum_reduction_for_comms(True)
                gathered, scattered = forms[module]
                if ours or wires.scatter:
                    wire = scattered if wires.scatter else None
                    module.set_custom_reduce_scatter(placed(ShardScatter(group, wire=wire), device))  # type: ignore[arg-type]
                if ours or wires.gather:
                    wire = gathered if wires.gather else None
                    gather = ShardGather(group, wire, wires.prefetch > 0)
                    module.set_custom_all_gather(placed(gather, device))  # type: ignore[arg-type]
        if wires.prefetch:
            _prefetch(stage, blocks, wires.prefetch)

    def before_backward(self, last: bool) -> None:
        for module, zero in self._zeros:
            if zero == 1 and not self._each:
                module.set_requires_gradient_sync(last, recurse=False)
            if zero < 3:
                module.set_reshard_after_backward(last, recurse=False)


def gathered_of(stage: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Of a stage that is sharded, each sharded parameter → the whole one that autograd differentiates, whose hooks see
    each backward's gradient before ranks add theirs up. FSDP2 makes these when it first gathers: every rank of `shard`
    calls this together, or it hangs."""
    modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    pairs = {p.sharded_param: p.unsharded_param for group in groups for p in group.fsdp_params}
    for module in modules:
        module.reshard()
    return pairs


def _policy_of(narrow: bool) -> MixedPrecisionPolicy:
    """The dtypes in which parameters are gathered and their gradients summed."""
    if not narrow:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def _keep_wide(module: FSDPModule, wide: torch.dtype | None) -> None:
    """Gradients stay in the dtype in which they are added up, if one is said: FSDP2 would round each sum to that of the
    parameters."""
    for group in module._get_fsdp_state()._fsdp_param_groups if wide else ():
        for p in (p for p in group.fsdp_params if p.sharded_param.requires_grad):
            p.sharded_param.grad_dtype = wide

        def init(group: Any = group, dtypes: Any = group._init_mp_dtypes) -> None:
            dtypes()
            group._orig_dtype = wide

        group._init_mp_dtypes = init  # type: ignore[method-assign]


def _wires_of(module: nn.Module, ranks: int, apart: Container[nn.Parameter]) -> tuple[EightBits, EightBits]:
    """The wires of what `fully_shard` is about to take of a module: for all parameters, and for those that learn."""
    params = [p for p in module.parameters() if not isinstance(p, DTensor) and p not in apart]
    segments = [segment_of(p.shape, ranks) for p in params]
    learning = (segment for segment, p in zip(segments, params, strict=True) if p.requires_grad)
    return EightBits(tuple(segments)), EightBits(tuple(learning))


def _prefetch(stage: FSDPModule, blocks: Sequence[nn.Module], ahead: int) -> None:
    """While one block computes, the next `ahead` are gathered, in forward and in backward."""
    order: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    stage.set_modules_to_forward_prefetch(order[:ahead])
    stage.set_modules_to_backward_prefetch(order[: -ahead - 1 : -1])
    for i, block in enumerate(order):
        block.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + ahead])
        before = order[max(0, i - ahead) : i]
        block.set_modules_to_backward_prefetch(before[::-1] or [stage])


def forget_gathered(stages: Iterable[nn.Module]) -> None:
    """Parameters that are still gathered from an earlier forward are gathered anew: their shards have other values."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
