"""Attention of foreign models: the library hands queries, keys and values to a core of ours, which has no weights.

So passes over a model find it as they find a gpt's: `tp` leaves it some heads, `cp` puts a ring or an exchange in its
place, and dropout of its weights is drawn by our noise.

Shapes: B batch, T positions, H query heads, G key/value heads, K head width.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.noise import Dropout, Noise

WAY = "unisono"
"""Name of this way of attention among those of transformers."""


class CurrentNoise:
    """What one block, stem or head is computed with now: foreign modules hand no noise on."""

    def __init__(self) -> None:
        self.noise: Noise | None = None


class HeldDropout(Dropout):
    """In the place of torch's dropout: the noise is the one of whoever computes now."""

    def __init__(self, p: float, held: CurrentNoise) -> None:
        super().__init__(p)
        self.held = held

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        return super().forward(x, self.held.noise)


class ForeignCore(nn.Module):
    """Attention of queries [B, H, T, K] to keys and values [B, G, T, K] of the same document → [B, H, T, K]; scores are
    divided by √K.

    causal: no query sees later keys. window: of keys that a query sees, itself included; 0: all. softcap: scores are
    squashed to ± this (Gemma 2, 2024); 0: they are not.
    """

    def __init__(self, drop: Dropout, causal: bool, window: int, softcap: float) -> None:
        super().__init__()
        self.drop, self.causal, self.window, self.softcap = drop, causal, window, softcap

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, noise: Noise | None) -> Tensor:
        queries = q_BHTK.shape[1] // k_BGTK.shape[1]
        k_BHTK, v_BHTK = k_BGTK, v_BGTK
        if queries > 1:
            k_BHTK, v_BHTK = (t.repeat_interleave(queries, dim=1) for t in (k_BGTK, v_BGTK))
        if self.softcap or self.drop.drops(noise):
            return self._attend(q_BHTK, k_BHTK, v_BHTK, noise)
        apart = noise is not None and noise.documents is not None
        seen = self._seen(q_BHTK, noise) if self.window or apart else None
        causal = self.causal and seen is None
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=seen, is_causal=causal)

    def _attend(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, noise: Noise | None) -> Tensor:
        score_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
        if self.softcap:
            score_BHTT = (score_BHTT / self.softcap).tanh() * self.softcap
        score_BHTT = score_BHTT.masked_fill(~self._seen(q_BHTK, noise), float("-inf"))
        return self.drop(score_BHTT.softmax(-1), noise).to(v_BHTK.dtype) @ v_BHTK

    def _seen(self, q_BHTK: Tensor, noise: Noise | None) -> Tensor:
        """bool [T, T], or [B, 1, T, T] where samples differ: which keys each query sees."""
        at_T = torch.arange(q_BHTK.shape[-2], device=q_BHTK.device)
        back_TT = at_T[:, None] - at_T
        seen = back_TT >= 0 if self.causal else torch.ones_like(back_TT, dtype=torch.bool)
        seen = seen & (back_TT.abs() < self.window) if self.window else seen
        if noise is None or noise.documents is None:
            return seen
        every = slice(None)
        return seen & ~noise.documents.apart(every, every)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, window={self.window}, softcap={self.softcap}"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for `WAY`, [B, H, T, K] → [B, T, H, K]. In the first run, on the meta device, the module
    is given its core, as it says itself what it needs, and notes how many heads and keys it has, and how wide."""
    if not hasattr(module, "core"):
        _give_core(module, query.shape[-2], dropout, **kwargs)
        module.shown = query.shape[1], key.shape[1], query.shape[3]  # type: ignore[assignment]
    width = query.shape[-1]
    factor = 1.0 if scaling is None else scaling * math.sqrt(width)
    query = query if math.isclose(factor, 1.0, rel_tol=1e-12) else query * factor
    y_BHTK = module.core(query, key, value, module.held.noise)  # type: ignore[operator,union-attr]
    return y_BHTK.transpose(1, 2).contiguous(), None


def _give_core(
    module: nn.Module,
    positions: int,
    dropout: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = sliding_window if sliding_window and sliding_window < positions else 0
    module.drop = Dropout(dropout)  # by this name its masks are drawn, whatever stands in the core's place
    module.core = ForeignCore(module.drop, bool(causal), window, softcap or 0.0)
    module.held = CurrentNoise()  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]


def register() -> None:
    """Tell transformers of this way of attention; again does no harm. It makes no mask then."""
    from transformers import AttentionInterface

    AttentionInterface.register(WAY, attend)
