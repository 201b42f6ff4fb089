"""Bytes that our own GPT keeps for the backward pass on a rank of `tp=RxC`. `work.activations` has them for one row.

Rows and columns split everything but the moments of norms, which each rank of a row has. No product keeps what it
gathered. tests/planner/test_grids.py holds this to what ranks keep.
"""

from typing import Any

from unisono.plan.grid import columns_of
from unisono.planner.work import activations
from unisono.planner.work.transformer import Transformer


def block_bytes(
    model: Transformer, *, micro_batch: int, tp: int, cp: int = 1, recompute: str = "none", itemsize: int = 4,
    cp_kind: str = "ring", **_: Any,
) -> float:  # fmt: skip
    """Bytes of one block and one micro-batch on one rank."""
    tokens, h, e, wide = _tokens(model, micro_batch, cp), model.d_model, itemsize, max(4, itemsize)
    if recompute == "full":
        return tokens * wide * h / tp
    attended = activations.attended_bytes(model, e, recompute == "selective", cp, cp_kind)
    masks = 2 * e * h if model.noisy else 0.0
    feed = e * model.d_ff * (4 if model.gated else 2)
    return tokens * (2 * _normed(model, wide, tp) + (attended + masks + feed) / tp)


def meeting_bytes(model: Transformer, micro_batch: int, tp: int, cp: int = 1, itemsize: int = 4) -> float:
    """Bytes beside what is kept while the gradients of the largest product are made: both factors as they were
    gathered, and the gradients of both before they are scattered."""
    h, wide = model.d_model, max(4, itemsize)
    widths = ((h, model.qkv_width), (h, h), (h, model.d_ff), (model.d_ff, h), (h, model.vocab))
    tokens, columns = _tokens(model, micro_batch, cp) * columns_of(tp) / tp, columns_of(tp)
    return (itemsize + wide) * max(tokens * inner + inner * outer / columns for inner, outer in widths)


def head_bytes(
    model: Transformer, micro_batch: int, tp: int, cp: int = 1, itemsize: int = 4, composed: bool = False
) -> float:
    """Bytes of the last norm, the classifier and the loss: what they keep."""
    wide = max(4, itemsize)
    each = _normed(model, wide, tp) + wide * model.vocab / tp + 8
    return _tokens(model, micro_batch, cp) * each


def loss_bytes(model: Transformer, micro_batch: int, tp: int, cp: int = 1, itemsize: int = 4) -> float:
    return activations.loss_bytes(model, micro_batch, tp, cp, itemsize)


def owed_bytes(model: Transformer, micro_batch: int, tp: int, cp: int = 1, itemsize: int = 4) -> float:
    """Return the bytes from which the classifier's gradient is computed: its input, split and as wide as it came, and
    the logits' gradient."""
    wide = max(4, itemsize)
    return _tokens(model, micro_batch, cp) * (wide * model.d_model + itemsize * model.vocab) / tp


def stem_bytes(model: Transformer, micro_batch: int, tp: int, cp: int = 1, itemsize: int = 4) -> float:
    return activations.stem_bytes(model, micro_batch, tp, cp, itemsize)


def _tokens(model: Transformer, micro_batch: int, cp: int) -> float:
    """Return the tokens of all rows together."""
    return micro_batch * model.context / cp


def _normed(model: Transformer, wide: int, tp: int) -> float:
    """Bytes of one token of all rows: what a norm makes of its input, one number of it, and the norm's output, which
    the products behind it keep."""
    return wide * (2 * model.d_model / tp + columns_of(tp) / tp)
