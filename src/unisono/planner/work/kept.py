"""Bytes that our own GPT keeps for the backward pass, as PyTorch plays it: plain autograd, kernel by kernel.

Megatron's list (`transformer.block_bytes`) holds for its fused kernels and for a residual stream in half precision.
Here norms and residual stream are fp32 also under autocast, which keeps beside them the half-precision copies that
products read, of activations and of weights; dropout's masks are as wide as what they drop; and under dropout attention
is written out. Under tp the gathered input of each column product is kept whole. Read off `saved_tensors_hooks` on a
CPU with PyTorch 2.13, and held to that by tests/models/test_kept.py.
"""

from unisono.planner.work.transformer import Transformer


def block_bytes(
    model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1, recompute: str = "none", itemsize: int = 4,
    composed: bool = False, cp_kind: str = "ring",
) -> float:  # fmt: skip
    """Bytes of one block and one micro-batch on one rank.

    itemsize: of what products compute with; below 4 it is autocast. composed: RMS norms of several kernels, as on a
    CPU, which keep one tensor more.
    """
    tokens, h, e, wide = _tokens(model, micro_batch, cp), model.d_model, itemsize, max(4, itemsize)
    if recompute == "full":
        return tokens * wide * h / tp
    casts = e < wide
    norms = 2 * _norm(model, wide, composed) / tp
    selective = recompute == "selective"
    # Gate and up read one input each where each casts or gathers its own.
    inputs = e * h * (3 if model.gated and (casts or tp > 1) else 2)
    attended = _attention(model, e, selective)
    if cp > 1:
        attended = _attention_dealt(model, e, selective, cp_kind)
    dealt = attended + e * model.d_ff * (4 if model.gated else 2)
    masks = 2 * e * h / tp if model.noisy else 0.0
    weights = e * _matrices(model) / tp if casts else 0.0
    return tokens * (norms + inputs + dealt / tp + masks) + weights


def head_bytes(
    model: Transformer,
    micro_batch: int,
    tp: int = 1,
    cp: int = 1,
    itemsize: int = 4,
    composed: bool = False,
) -> float:
    """Bytes of the last norm, the classifier and the loss: what they keep."""
    tokens, e, wide = _tokens(model, micro_batch, cp), itemsize, max(4, itemsize)
    # The log-probabilities, and the targets of 8 bytes.
    kept = _norm(model, wide, composed) / tp + e * model.d_model + wide * model.vocab / tp + 8
    return tokens * kept + (e * model.vocab * model.d_model / tp if e < wide else 0.0)


def loss_bytes(model: Transformer, micro_batch: int, tp: int = 1, cp: int = 1, itemsize: int = 4) -> float:
    """Bytes beside what is kept at the moment when the loss's gradient is made: of the log-probabilities, and of the
    logits."""
    return _tokens(model, micro_batch, cp) * 2 * max(4, itemsize) * model.vocab / tp


def owed_bytes(model: Transformer, micro_batch: int, tp: int = 1, cp: int = 1, itemsize: int = 4) -> float:
    """Bytes from which the classifier's gradient is made where that comes apart: what it read, which is kept whole, and
    the gradient of the logits."""
    return _tokens(model, micro_batch, cp) * itemsize * (model.d_model + model.vocab / tp)


def stem_bytes(model: Transformer, micro_batch: int, tp: int = 1, cp: int = 1, itemsize: int = 4) -> float:
    """Bytes of the tokens, and of the embedding's dropout mask."""
    wide = max(4, itemsize)
    return _tokens(model, micro_batch, cp) * (8 + (wide * model.d_model / tp if model.noisy else 0.0))


def _tokens(model: Transformer, micro_batch: int, cp: int) -> float:
    return micro_batch * model.context / cp


def _norm(model: Transformer, wide: int, composed: bool) -> float:
    """Bytes of one token: input, and mean and deviation, or the root alone."""
    if model.rms:
        return wide * (model.d_model * (2 if composed else 1) + 1)
    return wide * (model.d_model + 2)


def _attention(model: Transformer, e: int, selective: bool) -> float:
    """Bytes of one token from the product of queries, keys and values to the input of the last product. selective: what
    lies between is computed again, and its inputs and result are kept."""
    h, heads, groups = model.n_head * model.head_width, model.n_head, model.kv_heads
    qkv = h + 2 * model.kv_width
    if selective:
        return e * (qkv + (0 if model.learned else h + model.kv_width) + h)
    if model.noisy:
        # Operands of both products, softmax, mask and dropped weights, and the result.
        return e * (4 * h + 3 * heads * model.context)
    if groups == 1 and model.learned and heads > 1:
        kept = qkv + 2 * h  # one tensor, and keys and values repeated
    elif groups != heads:
        kept = 3 * h
    else:
        kept = qkv + (0 if model.learned else 2 * h)  # one tensor, and the turned copies
    # What attention gives, and its copy where heads have to move; a logarithm a row.
    return e * (kept + (h if model.learned else 2 * h)) + max(4, e) * heads


def _attention_dealt(model: Transformer, e: int, selective: bool, cp_kind: str) -> float:
    """The same of one token of a rank of cp, in which blocks of weights are never kept, but for those of `ulysses`,
    which attends as one device does, with some heads."""
    h, heads, groups = model.n_head * model.head_width, model.n_head, model.kv_heads
    qkv, rows = h + 2 * model.kv_width, max(4, e) * heads * (not selective)
    # One tensor of all three; queries in one of their own where they are turned or were between keys; turned keys.
    copies = h * (not model.learned or groups != heads) + model.kv_width * (not model.learned)
    if cp_kind != "ulysses" or selective:
        return e * (qkv + copies + h) + rows
    if model.noisy:
        return e * (4 * h + 3 * heads * model.context)
    return e * (qkv + (2 * h if groups != heads else 0) + 2 * h) + rows


def _matrices(model: Transformer) -> float:
    """Elements of a block's matrices."""
    return model.workload.blocks[0].flops / 2 / model.context - model.n_head * model.context * sum(
        model.score_widths
    )
