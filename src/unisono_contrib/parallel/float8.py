"""Products of numbers in eight bits: `precision=bf16:fp8` (Micikevicius et al., FP8 formats for deep learning, 2022).

Linear layers of blocks multiply weights and activations in e4m3 (4 bits of exponent, 3 of fraction) and gradients in
e5m2, and add up in fp32. Every row of a factor, along which a product adds up, has a scale of its own, found anew each
time: the smallest power of two by which the row's largest entry fits. A power of two rounds nothing, so what an element
is rounded to does not depend on who holds the rest of its row, but where it is so small that it counts for little.

Stem, head, norms, routers and experts stay as they are, and so do weights, their gradients and all sums over ranks.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.comm.device import casting, check_float8
from unisono.parallel.pass_context import PassContext, Stages
from unisono.parallel.tensor import ColumnLinear, RowLinear
from unisono.spec.layout import Split

AHEAD, BACK = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 2.0**-100  # rows of nothing but zeros, or of what is as good as that, have this largest entry
_SIDES = 16  # of which kernels want every dim to be a multiple


def quantized(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [N, K] → (x over its rows' scales in eight bits, scales [N, 1] in fp32)."""
    wide = x.float().contiguous()  # kernels read both factors along the rows
    top = wide.abs().amax(1, keepdim=True).clamp(min=LEAST)
    # frexp gives the power of two above the quotient; where that is one itself, twice what would do.
    scale = torch.ldexp(torch.ones_like(top), torch.frexp(top / torch.finfo(kind).max).exponent)
    # An infinity would come to be the largest number there is: what it is multiplied with must be none.
    return (wide / scale).to(kind), torch.where(top.isfinite(), scale, torch.nan)


def multiplied(a: Tensor, b: Tensor, kind: torch.dtype, out: torch.dtype) -> Tensor:
    """a [N, K] and b [M, K] → a bᵀ [N, M], a in `kind` and b in e4m3, both rounded along K."""
    rows, columns = len(a), len(b)
    a, b = _filled(a), _filled(b)
    (left, left_scale), (right, right_scale) = quantized(a, kind), quantized(b, AHEAD)
    y = torch._scaled_mm(left, right.t(), left_scale, right_scale.t(), out_dtype=torch.bfloat16)
    return y[:rows, :columns].to(out)


def _filled(x: Tensor) -> Tensor:
    """With zeros behind, up to dims that kernels take."""
    n, k = (-side % _SIDES for side in x.shape)
    return F.pad(x, (0, k, 0, n)) if n or k else x


class Float8Product(torch.autograd.Function):
    """x [..., K], weight [M, K], bias [M] → [..., M] in `out`."""

    @staticmethod
    def forward(ctx, x, weight, bias, out):  # type: ignore[override]
        flat = x.to(out).flatten(0, -2)
        ctx.save_for_backward(flat, weight)
        ctx.shape, ctx.dtype, ctx.out = x.shape, x.dtype, out
        ctx.add = None if bias is None else bias.dtype
        y = multiplied(flat, weight, AHEAD, out)
        y = y if bias is None else y + bias.to(out)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        flat, weight = ctx.saved_tensors
        g = grad.flatten(0, -2)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = multiplied(g, weight.t(), BACK, ctx.out).view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            to_weight = multiplied(g.t(), flat.t(), BACK, ctx.out).to(weight.dtype)
        to_bias = None if ctx.add is None else g.sum(0).to(ctx.add)
        return to_x, to_weight, to_bias, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as `F.linear` does under autocast, in eight bits."""
    out = torch.get_autocast_dtype(casting(x.device))
    with torch.autocast(casting(x.device), enabled=False):
        return Float8Product.apply(x, weight, bias, out)  # type: ignore[return-value]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return product(x, module.weight, module.bias)


def use_float8(stages: Stages, context: PassContext) -> None:
    """Let linear layers of this rank's blocks multiply in eight bits. Raises UsageError U-P26 where the device
    cannot."""
    check_float8(context.device)
    for stage in stages.values():
        for number, block in stage.blocks.items():
            for module in linears(block, f"blocks.{number}", context):
                if isinstance(module, ColumnLinear | RowLinear):
                    module.product = product
                else:
                    module.forward = partial(_forward, module)  # type: ignore[method-assign]


def linears(
    block: nn.Module, prefix: str, context: PassContext
) -> Sequence[nn.Linear | ColumnLinear | RowLinear]:
    """The linear layers of a block that multiply in eight bits."""
    apart = (Split.ROUTER, Split.EXPERTS)
    held = {name for name, _ in block.named_modules(prefix=prefix) if context.anatomy.split_of(name) in apart}
    return [
        module
        for name, module in block.named_modules(prefix=prefix)
        if isinstance(module, nn.Linear | ColumnLinear | RowLinear)
        and module.weight.dim() == 2
        and not any(f"{name}.".startswith(f"{part}.") for part in held)
    ]
