"""Fused attention on the simulated device, by the CPU's kernels: as on a GPU, no matrix of all scores is kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono_contrib.comm.sim.tensor import SimTensor, launch

_aten: Any = torch.ops.aten


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`: fused where there is no mask, no dropout, and a head of keys for each of queries.

    torch asks a device's C++ which way to take, and takes the plain one where there is none.
    """
    if attn_mask is None and not dropout_p and query.dim() == 4 and query.shape[1] == key.shape[1]:
        fused = _aten._scaled_dot_product_fused_attention_overrideable
        return fused(query, key, value, None, 0.0, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    plain = _aten._scaled_dot_product_attention_math
    return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _forward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    whole: tuple[Any, ...] = (*args, *(None, 0.0, False)[len(args) - 3 :])
    query, key, value, _, dropout, causal = whole[:6]
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
    out, sums = launch(kernel, (query, key, value, dropout, causal), {"scale": kwargs.get("scale")})
    none = SimTensor(torch.empty(0))
    return out, sums, none, none, query.shape[2], key.shape[2], none, none, none


def _backward(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    grad, query, key, value, _, _, out, sums, *_, dropout, causal, _, _ = args
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grads = launch(
        kernel, (grad, query, key, value, out, sums, dropout, causal), {"scale": kwargs.get("scale")}
    )
    return *grads, SimTensor(torch.empty(0))


ATTENTION = {
    _aten._scaled_dot_product_fused_attention_overrideable.default: _forward,
    _aten._scaled_dot_product_fused_attention_overrideable_backward.default: _backward,
}
"""Operations, as `copies.SPECIAL` has them."""
