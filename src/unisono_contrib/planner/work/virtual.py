"""Work of ranks where every layer is computed by virtual shards (`sync=canonical:shards=S`).

Features, heads and vocabulary are split into S shards, positions into S stretches. A rank of tp computes S / tp
shards, a rank of cp S / cp stretches. Each product and each call has the shape of one shard and one stretch. Sums
over tp go stretch by stretch; weight gradients cross cp shard by shard, gathered and added along a tree. Positions
are whole on tp.

Of the ranks of cp the last one is counted: its queries see most keys, and the others wait for it.
tests/planner/test_virtual.py holds products and kernels to what a rank starts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, NamedTuple

from unisono.plan import Plan
from unisono.planner.machines.order import virtual_of
from unisono.planner.source import Source
from unisono.planner.work.blocks import BACKWARD_LAUNCHES, FORWARD_LAUNCHES, elementwise_bytes, mask_bytes
from unisono.planner.work.stage import ITEM, OURS, Habits, MatrixProduct, PartPass, Transfer
from unisono.planner.work.transformer import Transformer

_COUNTED = Source("specification", "kernels of parallel.virtual, counted")
# Of attention that is written out: products, quotient, mask (of two), masking, softmax; backward those that these have.
WRITTEN_KERNELS: Annotated[int, _COUNTED] = 7
# That draw one mask of dropout; backward, of what it drops.
MASK_KERNELS: Annotated[tuple[int, int], _COUNTED] = (79, 2)
# Of a norm over squares that is no kernel of its own.
COMPOSED_KERNELS: Annotated[tuple[int, int], _COUNTED] = (6, 14)
# Elements that attention's kernels read and write of a score between its products.
_SCORE: Annotated[tuple[float, float], _COUNTED] = (6.0, 7.0)
_TERM = 3.0  # two read, their sum written
_COPY = 2.0  # read and written


class Shards(NamedTuple):
    """The virtual shards of one rank. count: of the model. features, stretches: of the rank. tokens: of one stretch.
    keys: number of keys that the queries of each stretch attend to."""

    count: int
    features: int
    stretches: int
    tokens: float
    keys: tuple[int, ...]

    @property
    def each(self) -> int:
        """Products that the rank makes of one of a layer's."""
        return self.features * self.stretches


def shards_of(model: Transformer, plan: Plan, micro_batch: float) -> Shards:
    """Return the shards of the last rank of cp."""
    count = virtual_of(plan)
    stretch, stretches = model.context // count, count // plan.cp
    keys = tuple(stretch * (place + 1) for place in range(count - stretches, count))
    return Shards(count, count // plan.tp, stretches, micro_batch * stretch, keys)


def columns_of(model: Transformer) -> list[tuple[int, int]]:
    """Return (inner, columns) of a block's column-parallel products. Each reads the output of a norm."""
    ups = [(model.d_model, model.d_ff)] * (2 if model.gated else 1)
    return [(model.d_model, model.qkv_width), *ups]


def rows_of(model: Transformer) -> list[tuple[int, int]]:
    """Return (inner, columns) of a block's row-parallel products, whose results tp adds up."""
    return [(model.n_head * model.head_width, model.d_model), (model.d_ff, model.d_model)]


def products(model: Transformer, plan: Plan, micro_batch: float) -> list[MatrixProduct]:
    """Return a block's products with weights: each at the shape of one virtual shard, once for each shard."""
    shards = shards_of(model, plan, micro_batch)
    columns = [
        MatrixProduct(shards.tokens, inner, wide / shards.count, times=shards.each)
        for inner, wide in columns_of(model)
    ]
    dealt = [
        MatrixProduct(shards.tokens, inner / shards.count, wide, times=shards.each)
        for inner, wide in rows_of(model)
    ]
    return [columns[0], dealt[0], *columns[1:], dealt[1]]


def scores(model: Transformer, plan: Plan, micro_batch: float) -> tuple[MatrixProduct, ...]:
    """Return attention's products, which write their scores: some heads and one stretch of queries, with all keys up
    to its end."""
    shards, shapes = shards_of(model, plan, micro_batch), list[MatrixProduct]()
    many, stretch, (inner, width) = (
        model.n_head / shards.count,
        shards.tokens / micro_batch,
        model.score_widths,
    )
    for keys in shards.keys:
        shapes.append(MatrixProduct(stretch, inner, keys, micro_batch * many, times=shards.features))
        shapes.append(MatrixProduct(stretch, keys, width, micro_batch * many, times=shards.features))
    return tuple(shapes)


def score_elements(model: Transformer, plan: Plan, micro_batch: float) -> float:
    """Scores that a rank writes in one pass over a block."""
    shards = shards_of(model, plan, micro_batch)
    return shards.tokens * sum(shards.keys) * model.n_head / plan.tp


def head_product(model: Transformer, plan: Plan, micro_batch: float) -> MatrixProduct:
    """The classifier."""
    shards = shards_of(model, plan, micro_batch)
    return MatrixProduct(shards.tokens, model.d_model, model.vocab / shards.count, times=shards.each)


def kernels(model: Transformer, plan: Plan, habits: Habits, backward: bool) -> float:
    """Return the kernels that a block starts beyond those of a block of whole layers."""
    shards, wide = shards_of(model, plan, 1.0), len(columns_of(model))
    f, p, each = shards.features, shards.stretches, shards.each
    written = habits.fused_attention and not model.noisy
    attention = WRITTEN_KERNELS * each - (1 if written else WRITTEN_KERNELS)
    composed = COMPOSED_KERNELS[backward] if model.rms and habits.composed else 1
    started = float(attention + 2 * composed * (p - 1))
    started += MASK_KERNELS[backward] * (each - 1) if model.noisy else 0
    casts = 2 * (wide + 2) * (each - 1) if ITEM[plan.precision] < 4 else 0
    products = (wide + 2) * (each - 1)
    if backward:
        return started + 2 * products + casts + _behind(model, plan, shards)
    joined = 2 + wide * (p + 1) + 2 + f + 1
    return started + products + casts + joined + _copies(model, plan, shards) + _terms(model, plan, shards)


def _copies(model: Transformer, plan: Plan, shards: Shards) -> float:
    """Kernels of a forward pass over a block that put a part in order: stretches, where there are several; a row
    product's weights and inputs; keys and values, queries, keys that a stretch sees, each for its queries."""
    f, p, each, wide = shards.features, shards.stretches, shards.each, len(columns_of(model))
    started = (4 + wide) * p * (p > 1) + 2 * (f + each) * (f > 1)
    started += 5 * each + 1 - 2 * f  # the last stretch sees keys that are in order
    started += 0 if f == 1 and plan.cp > 1 else 2 * f  # as those of one shard are that were gathered
    usual = 4 if model.noisy else 3 if model.kv_heads != model.n_head else 0
    # Keys and values, gathered: before, on their way, behind.
    return started - usual + (6 if plan.cp > 1 else 0)


def _terms(model: Transformer, plan: Plan, shards: Shards) -> float:
    """Kernels that add up a row product's terms, here and of the other ranks, and the bias."""
    each = shards.features - 1 + (plan.tp if plan.tp > 1 else 0) + bool(model.bias)
    return 2 * shards.stretches * each


def _behind(model: Transformer, plan: Plan, shards: Shards) -> float:
    """Kernels of a backward pass over a block beside products and attention: copies, joins, sums of uses."""
    f, p, each, wide = shards.features, shards.stretches, shards.each, len(columns_of(model))
    started = 4 * p * (p > 1) + 4 * each + (2 if plan.cp > 1 else 0) - bool(model.noisy)
    started += 9 + 2 * wide + 2 * p + f + 2 * f * (p - 1)
    started += wide * p * (f - 1 + (plan.tp if plan.tp > 1 else 0))
    uses = sum(1 for _ in _uses(model, shards)) + 2 * f
    started += uses * (p - 1 + (plan.cp if plan.cp > 1 else 0))
    if model.bias:
        started += wide + wide * (each - 1) + 2 * (p - 1)
    return started + (2 * (each - 1) if model.kv_heads != model.n_head else 0)


def _uses(model: Transformer, shards: Shards) -> Iterator[float]:
    """Elements of each parameter of a block as stretches use it, each by itself: matrices by shards, and vectors. The
    gradients of its uses are added up."""
    for inner, columns in (*columns_of(model), *rows_of(model)):
        yield from [inner * columns / shards.count] * shards.features
    if model.bias:
        for _, columns in columns_of(model):
            yield from [columns / shards.count] * shards.features
        yield from [float(columns) for _, columns in rows_of(model)]
    yield from [float(model.d_model)] * (2 * _vectors(model))


def _keys_used(model: Transformer, shards: Shards) -> float:
    """Elements of the keys, or the values, of one shard's heads and one sample, which every stretch uses too: for each
    of its shards a rank has two such."""
    return model.context * model.kv_width / shards.count


def _vectors(model: Transformer) -> int:
    """Return the number of a norm's vectors."""
    return 2 if model.bias and not model.rms else 1


def moved(model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> float:
    """Bytes that a block's kernels move beside those of a block in one row: copies, sums of terms and of uses, and what
    attention writes."""
    shards, e, wide = shards_of(model, plan, micro_batch), ITEM[plan.precision], max(4, ITEM[plan.precision])
    here, h, tp = shards.tokens * shards.stretches, model.d_model, plan.tp
    apart, columns = shards.stretches > 1, columns_of(model)
    outputs = sum(width for _, width in columns) / tp
    more = shards.features - 1 + (tp - 1)
    seen = micro_batch * sum(shards.keys) * model.kv_width / tp
    repeated = micro_batch * sum(shards.keys) * model.n_head * model.head_width / tp
    attended = _SCORE[backward] * score_elements(model, plan, micro_batch)
    read = sum(inner for inner, _ in rows_of(model)) / tp
    if backward:
        uses = sum(_uses(model, shards)) + 2 * shards.features * micro_batch * _keys_used(model, shards)
        summed = _TERM * uses * (shards.stretches - 1 + plan.cp - 1) * wide
        gradients = len(columns) * h * more * _TERM * wide + _COPY * (outputs + read + 2 * h) * e
        return here * gradients + summed + e * (attended + 2 * _TERM * (seen + repeated))
    norms = 2 * _COPY * h * (1 + apart) * wide
    taken = _COPY * (len(columns) * h * apart * wide + 2 * outputs * e)
    results = (_COPY * read * (shards.features > 1) + 2 * h * (_TERM * more + _COPY)) * e
    weights = (
        sum(inner * width for inner, width in rows_of(model)) / tp * _COPY * wide * (shards.features > 1)
    )
    keys = _COPY * (2 * here * model.kv_width / tp + 2 * seen + 2 * repeated + 2 * here * h / tp)
    casts = 0.0
    if e < wide:  # of every use of weights and inputs
        every = sum(inner * width for inner, width in (*columns, *rows_of(model))) / tp
        casts = (e + wide) * (shards.stretches * every + shards.features * len(columns) * here * h)
    return here * (norms + taken + results) + weights + e * (keys + attended) + casts


def attention(model: Transformer, plan: Plan, micro_batch: float) -> PartPass:
    """Return what recompute=selective computes once more of a block, beside products and calls."""
    shards, e = shards_of(model, plan, micro_batch), ITEM[plan.precision]
    many = (
        (WRITTEN_KERNELS + 5) * shards.each
        + 2 * shards.features
        + (MASK_KERNELS[0] * shards.each if model.noisy else 0)
    )
    seen = (
        _COPY
        * 2
        * micro_batch
        * sum(shards.keys)
        * (model.kv_width + model.n_head * model.head_width)
        / plan.tp
    )
    return PartPass(moved=e * (seen + _SCORE[0] * score_elements(model, plan, micro_batch)), kernels=many)


def block(model: Transformer, plan: Plan, habits: Habits, micro_batch: float, *, backward: bool) -> PartPass:
    """Return one pass over one block by virtual shards: positions are whole on tp, and attention writes its scores."""
    shapes = tuple(products(model, plan, micro_batch))
    if backward:
        shapes = tuple(gradient for product in shapes for gradient in product.gradients)
    attended, whole = scores(model, plan, micro_batch), replace(OURS, sequence_parallel=False)
    tokens = micro_batch * model.context / plan.cp
    return PartPass(
        products=shapes,
        scores=tuple(gradient._replace(times=2.0 * gradient.times) for gradient in attended)
        if backward
        else attended,
        moved=elementwise_bytes(model, plan, whole, tokens, backward)
        + moved(model, plan, micro_batch, backward),
        masks=mask_bytes(model, plan, whole, tokens),
        kernels=(BACKWARD_LAUNCHES if backward else FORWARD_LAUNCHES)
        + kernels(model, plan, habits, backward),
        calls=tuple(block_calls(model, plan, micro_batch, backward)),
    )


def again(model: Transformer, plan: Plan, habits: Habits, micro_batch: float) -> PartPass:
    """Return what a backward pass by virtual shards recomputes."""
    calls = tuple(again_calls(model, plan, micro_batch))
    if plan.recompute == "full":
        return block(model, plan, habits, micro_batch, backward=False).like(calls=calls)
    if plan.recompute != "selective":
        return PartPass()
    part = attention(model, plan, micro_batch)
    return PartPass(
        scores=scores(model, plan, micro_batch),
        moved=part.moved,
        kernels=part.kernels,
        calls=calls,
    )


def stem(row: PartPass, model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> PartPass:
    """The embedding, in which each shard of the rank looks all tokens up. row: that of one row."""
    shards = shards_of(model, plan, micro_batch)
    return PartPass(
        moved=row.moved * shards.features,
        kernels=end_kernels(shards, head=False, backward=backward),
        calls=tuple(end_calls(model, plan, micro_batch, backward, stem=True, head=False)),
    )


def head(row: PartPass, model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> PartPass:
    """The classifier and the loss. row: those of one row."""
    (whole,), shards = row.products, shards_of(model, plan, micro_batch)
    product = head_product(model, plan, micro_batch)
    return row.like(
        products=(product._replace(times=whole.times * product.times),),
        kernels=end_kernels(shards, head=True, backward=backward),
        calls=tuple(end_calls(model, plan, micro_batch, backward, stem=False, head=True)),
    )


def block_calls(
    model: Transformer, plan: Plan, micro_batch: float, backward: bool, again: bool = False
) -> list[Transfer]:
    """Return the calls of one block. again: of a recomputed pass, which ends with the last tensor that is kept."""
    shards, e = shards_of(model, plan, micro_batch), ITEM[plan.precision]
    calls = list[Transfer]()
    if plan.tp > 1:
        whole = plan.tp * shards.tokens * model.d_model
        if backward:
            nbytes = whole * _stored(plan)
            calls.append(Transfer("tp", "all_gather", nbytes, shards.stretches * len(columns_of(model))))
        else:
            stops = 1 if again and not model.noisy else 0
            calls.append(Transfer("tp", "all_gather", whole * e, 2.0 * shards.stretches - stops))
    if plan.cp > 1 and backward:
        calls += (
            Transfer("cp", "all_gather", plan.cp * elements * _stored(plan))
            for elements in _uses(model, shards)
        )
        used = micro_batch * _keys_used(model, shards) * e
        calls.append(Transfer("cp", "all_gather", plan.cp * used, 2.0 * shards.features))
    elif plan.cp > 1:
        calls += attention_calls(model, plan, micro_batch)
    return calls


def attention_calls(model: Transformer, plan: Plan, micro_batch: float) -> list[Transfer]:
    """Keys and values of all positions, which attention gathers."""
    if plan.cp == 1:
        return []
    whole = micro_batch * model.context * model.kv_width / plan.tp * ITEM[plan.precision]
    return [Transfer("cp", "all_gather", whole, 2.0)]


def again_calls(model: Transformer, plan: Plan, micro_batch: float) -> list[Transfer]:
    """Return the calls of a backward pass's recomputation."""
    if plan.recompute == "full":
        return block_calls(model, plan, micro_batch, False, again=True)
    return attention_calls(model, plan, micro_batch) if plan.recompute == "selective" else []


def end_calls(
    model: Transformer, plan: Plan, micro_batch: float, backward: bool, *, stem: bool, head: bool
) -> Iterator[Transfer]:
    """Yield the calls of the ends of the model that are here."""
    shards, wide = shards_of(model, plan, micro_batch), float(max(4, ITEM[plan.precision]))
    whole, table = plan.tp * shards.tokens * model.d_model, model.vocab * model.d_model / shards.count
    if stem and backward and plan.cp > 1:
        yield Transfer("cp", "all_gather", plan.cp * table * _stored(plan), shards.features)
        if model.learned:
            yield Transfer(
                "cp", "all_gather", plan.cp * (model.rows or model.context) * model.d_model * _stored(plan)
            )
    if stem and not backward and plan.tp > 1:
        yield Transfer("tp", "all_gather", whole * _stored(plan), shards.stretches)
    if head and backward and plan.tp > 1:
        yield Transfer("tp", "all_gather", whole * _stored(plan), shards.stretches)
    if head and backward and plan.cp > 1:
        yield Transfer("cp", "all_gather", plan.cp * table * _stored(plan), shards.features)
        yield Transfer("cp", "all_gather", plan.cp * model.d_model * _stored(plan), _vectors(model))
    if head and not backward:
        if plan.tp > 1:  # the largest logit, then the sum and the target's
            yield Transfer("tp", "all_reduce", shards.tokens * wide, shards.stretches)
            yield Transfer("tp", "all_gather", plan.tp * 2 * shards.tokens * wide, shards.stretches)
        if plan.cp > 1:  # the loss
            yield Transfer("cp", "all_gather", plan.cp * wide)


def end_kernels(shards: Shards, *, head: bool, backward: bool) -> float:
    """Return the kernels of stem or head beyond the usual ones."""
    if head:  # a norm, a product, and of the loss largest, difference, target's, exponential, sum, quotient
        return shards.stretches * (2 + shards.features * (6 if backward else 10))
    return shards.stretches * (1 + shards.features * (2 if backward else 6))


def _stored(plan: Plan) -> float:
    """Bytes of a weight's gradient as uses make it, of what a table gives, and of what a norm does: fp32 under
    autocast."""
    return float(ITEM[plan.precision] if plan.arithmetic.narrow else max(4, ITEM[plan.precision]))
