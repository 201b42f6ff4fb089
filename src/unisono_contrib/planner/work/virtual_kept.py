"""Bytes that our own GPT keeps for the backward pass where every layer is computed by virtual shards.

Beside what whole layers keep (`work.activations`) there are: the queries of each stretch; for each the keys and
values up to its end, once for every query head; the scores; reordered weights of row-parallel products; under
autocast a cast of a weight for every stretch and of an input for every shard. Of the ranks of cp the last one is
counted. tests/planner/test_virtual.py holds this to what ranks keep.
"""

from unisono.planner.work.expert_parallel import FLAG, INDEX
from unisono.planner.work.transformer import Transformer
from unisono_contrib.planner.work.virtual import columns_of, rows_of


def block_bytes(
    model: Transformer, *, micro_batch: int, shards: int, normed: float, tp: int = 1, cp: int = 1,
    recompute: str = "none", itemsize: int = 4,
) -> float:  # fmt: skip
    """Bytes of one block and one micro-batch on one rank. normed: of one token in a norm."""
    tokens, h, e, wide = micro_batch * model.context / cp, model.d_model, itemsize, max(4, itemsize)
    if recompute == "full":
        return tokens * wide * h
    features, stretches, casts = shards // tp, shards // cp, itemsize < 4
    # One tensor where stretches and shards are all here at once; else each product puts its own in order.
    inputs = sum(e * h * (features if casts else 1) for _ in columns_of(model))
    if model.gated and stretches == 1 and not casts:
        inputs -= e * h
    hidden = e * (model.d_ff * (3 if model.gated else 1) + sum(inner for inner, _ in rows_of(model))) / tp
    masks = 2 * h * (wide if model.bias else e) if model.noisy else 0.0
    rest = tokens * (2 * normed + inputs + hidden + masks)
    return rest + _weights(model, features, stretches, tp, e, casts) + attended_bytes(
        model, micro_batch, shards, tp, cp, e, recompute == "selective"
    )  # fmt: skip


def _weights(model: Transformer, features: int, stretches: int, tp: int, e: int, casts: bool) -> float:
    if casts:
        every = sum(inner * columns for inner, columns in (*columns_of(model), *rows_of(model)))
        return e * stretches * every / tp
    return e * sum(inner * columns for inner, columns in rows_of(model)) / tp * (features > 1)


def working_bytes(model: Transformer, micro_batch: int, shards: int, tp: int, cp: int) -> float:
    """Bytes of gradients on their way in a block's feed-forward layer: of what lies between its products, in parts and
    joined; of the stream beside it; of its input as each shard makes one, and of weights as each stretch does, before
    they are added up."""
    tokens, h = micro_batch * model.context / cp, model.d_model
    uses = tokens * (h + h * (shards // tp)) + shards // cp * h * model.d_ff / tp
    return 4.0 * (2.0 * tokens * model.d_ff / tp + uses)


def attended_bytes(
    model: Transformer, micro_batch: int, shards: int, tp: int, cp: int, e: int, selective: bool
) -> float:
    """Bytes of attention between its products with weights. selective: it is computed again, and what it takes is
    kept."""
    tokens, h = micro_batch * model.context / cp, model.n_head * model.head_width
    if selective:
        turned = 0 if model.learned else h + model.kv_width
        return tokens * e * (h + 2 * model.kv_width + turned) / tp
    stretch, stretches = model.context // shards, shards // cp
    keys = sum(stretch * (place + 1) for place in range(shards - stretches, shards))
    scores = micro_batch * stretch * keys * model.n_head / tp
    seen = 2 * micro_batch * keys * h / tp
    masked = FLAG * stretch * keys * (shards // tp)
    return e * (tokens * h / tp + seen + scores * (3 if model.noisy else 1)) + masked


def head_bytes(
    model: Transformer, micro_batch: int, *, shards: int, normed: float, tp: int = 1, cp: int = 1, itemsize: int = 4
) -> float:  # fmt: skip
    """Bytes of the last norm, the classifier and the loss: what they keep."""
    tokens, e, features = micro_batch * model.context / cp, itemsize, shards // tp
    inputs, weights = e * model.d_model, 0.0
    if e < 4:
        inputs, weights = features * inputs, e * (shards // cp) * model.vocab * model.d_model / tp
    return tokens * (normed + inputs + classified(model, tp, e, shards)) + weights


def classified(model: Transformer, tp: int, itemsize: int, shards: int) -> float:
    """Return bytes that the loss keeps of one token: probabilities, and for each shard the target's place and whether
    it is there."""
    return max(4, itemsize) * model.vocab / tp + (shards // tp) * (INDEX + FLAG) + FLAG


def stem_bytes(
    model: Transformer, micro_batch: int, *, shards: int, tp: int = 1, cp: int = 1, itemsize: int = 4
) -> float:  # fmt: skip
    """Return bytes of the tokens, of each shard's own tokens, and of the embedding's dropout mask."""
    mask = max(4, itemsize) * model.d_model if model.noisy else 0.0
    return micro_batch * model.context / cp * (INDEX + (shards // tp) * (INDEX + FLAG) + mask)
