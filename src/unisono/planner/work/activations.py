"""Bytes that our own GPT, or one with experts, keeps for the backward pass, as PyTorch plays it: plain autograd, kernel
by kernel.

Megatron's list (`megatron_activations.block_bytes`) is of its fused kernels and a half-precision residual stream. Here
norms and residual stream are fp32 also under autocast, which keeps beside them the half-precision copies that products
read, of activations and of weights; dropout's masks are as wide as what they drop; and under dropout attention
is written out. Under tp the gathered input of each column product is kept whole. Read off `saved_tensors_hooks` on a
CPU with PyTorch 2.13, and held to that by tests/models/test_kept.py.
"""

from unisono.plan import Plan
from unisono.planner.machines.order import virtual_of
from unisono.planner.work.expert_parallel import INDEX
from unisono.planner.work.experts import Experts, matrices
from unisono.planner.work.layouts import virtual_kept
from unisono.planner.work.transformer import Transformer


def block_bytes(
    model: Transformer, *, micro_batch: int, tp: int = 1, cp: int = 1, ep: int = 1, recompute: str = "none",
    itemsize: int = 4, composed: bool = False, cp_kind: str = "ring", sparse: float | None = None, shards: int = 1,
) -> float:  # fmt: skip
    """Bytes of one block and one micro-batch on one rank.

    itemsize: of what products compute with; below 4 it is autocast. composed: RMS norms of several kernels, as on a
    CPU, which keep one tensor more. sparse: how much of it has experts, the mean of all blocks if None. shards: virtual
    ones by which it is computed.
    """
    if shards > 1:
        return virtual_kept().block_bytes(
            model, micro_batch=micro_batch, shards=shards, normed=_norm(model, max(4, itemsize), composed), tp=tp,
            cp=cp, recompute=recompute, itemsize=itemsize,
        )  # fmt: skip
    tokens, h, e, wide = _tokens(model, micro_batch, cp), model.d_model, itemsize, max(4, itemsize)
    if recompute == "full":
        return tokens * wide * h / tp
    routed = model.sparse_share if sparse is None else sparse
    norms = 2 * _norm(model, wide, composed) / tp
    selective = recompute == "selective"
    attended = attended_bytes(model, e, selective, cp, cp_kind)
    masks = 2 * e * h / tp if model.noisy else 0.0
    kept = norms + e * h + attended / tp + masks + (1.0 - routed) * _feed(model, model.d_ff, e, tp)
    weights = 0.0
    if e < wide:
        weights = sum(inner * columns for inner, columns, _, _ in model.attention_products)
        weights += (1.0 - routed) * matrices(model.gated) * h * model.d_ff
    if model.experts and routed:
        kept += routed * _experts(model, model.experts, e, tp, ep)
        if e < wide:
            local = model.experts.count * model.experts.width * tp / (ep * max(1, tp // ep))
            weights += routed * matrices(model.gated) * h * (local + model.experts.shared_width)
    return tokens * kept + e * weights / tp


def attention_bytes(model: Transformer, micro_batch: int, plan: Plan, itemsize: int) -> float:
    """Of these bytes what is left while the gradients of attention are made."""
    e, wide = itemsize, max(4, itemsize)
    if (shards := virtual_of(plan)) > 1:
        norm = _norm(model, wide, True) + e * model.d_model
        attended = virtual_kept().attended_bytes(model, micro_batch, shards, plan.tp, plan.cp, e, False)
        return _tokens(model, micro_batch, plan.cp) * norm + attended
    attended = attended_bytes(model, e, False, plan.cp, plan.cp_kind)
    norm = _norm(model, wide, True) / plan.tp
    return _tokens(model, micro_batch, plan.cp) * (norm + e * model.d_model + attended / plan.tp)


def _feed(model: Transformer, width: int, e: int, tp: int) -> float:
    """Bytes of one token in a feed-forward layer. Gate and up read one input each where each casts or gathers its
    own."""
    apart = model.gated and (e < 4 or tp > 1)
    return e * (model.d_model * (2 if apart else 1) + width * (4 if model.gated else 2) / tp)


def _experts(model: Transformer, experts: Experts, e: int, tp: int, ep: int) -> float:
    """Bytes of one token in a sparse layer: the router's input, scores and order of all experts, and its choices; of
    each choice the token as it comes to its expert, what that makes of it on the way, and its result, which is weighed.
    Tokens that come from other ranks are put in the order of experts, and back."""
    h, wide, cut = model.d_model, max(4, e), max(1, tp // ep)
    router = wide * h + experts.count * (wide + INDEX) + wide * (experts.top_k + 1)
    load = arriving(experts, ep)
    chosen = experts.top_k * cut * min(1.0, experts.capacity or 1.0)
    width = experts.width * (4 if model.gated else 2) / cut
    here = experts.top_k * cut * load * (e * (h + width) + (2 * INDEX if ep > 1 else 0))
    shared = 0.0
    if experts.shared_width:
        shared = _feed(model, experts.shared_width, e, tp) - (e * h if e == wide and tp == 1 else 0)
    return (router + here + chosen * (e * h + INDEX + wide)) / tp + shared


def arriving(experts: Experts, ep: int) -> float:
    """Tokens that a rank's experts compute on, in shares of the mean: the load tells ranks apart only where they hold
    different experts, and room is never filled up."""
    most = experts.load if ep > 1 else 1.0
    return min(most, experts.capacity) if experts.capacity else most


def head_bytes(
    model: Transformer,
    micro_batch: int,
    tp: int = 1,
    cp: int = 1,
    itemsize: int = 4,
    composed: bool = False,
    shards: int = 1,
) -> float:
    """Bytes of the last norm, the classifier and the loss: what they keep."""
    if shards > 1:
        normed = _norm(model, max(4, itemsize), composed)
        sizes = {"shards": shards, "normed": normed, "tp": tp, "cp": cp, "itemsize": itemsize}
        return virtual_kept().head_bytes(model, micro_batch, **sizes)
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


def stem_bytes(
    model: Transformer, micro_batch: int, tp: int = 1, cp: int = 1, itemsize: int = 4, shards: int = 1
) -> float:
    """Bytes of the tokens, and of the embedding's dropout mask."""
    if shards > 1:
        sizes = {"shards": shards, "tp": tp, "cp": cp, "itemsize": itemsize}
        return virtual_kept().stem_bytes(model, micro_batch, **sizes)
    wide = max(4, itemsize)
    return _tokens(model, micro_batch, cp) * (8 + (wide * model.d_model / tp if model.noisy else 0.0))


def _tokens(model: Transformer, micro_batch: int, cp: int) -> float:
    return micro_batch * model.context / cp


def _norm(model: Transformer, wide: int, composed: bool) -> float:
    """Bytes of one token: input, and mean and deviation, or the root alone."""
    if model.rms:
        return wide * (model.d_model * (2 if composed else 1) + 1)
    return wide * (model.d_model + 2)


def attended_bytes(model: Transformer, e: int, selective: bool, cp: int, cp_kind: str) -> float:
    """Bytes of one token in attention, of all ranks of tp together."""
    if cp > 1:
        return _attention_dealt(model, e, selective, cp_kind)
    return _attention(model, e, selective)


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
