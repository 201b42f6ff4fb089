"""What the parts of a transformer do in one pass on one rank: lists that depend on model, plan and habits alone.

An axis that splits blocks adds its calls here, and its share of products and bytes. `work.activations` counts what our
blocks keep, `work.megatron_activations` what Megatron's keep. Bytes of elementwise kernels are those that the usual
fused kernels read and write: norm; bias, dropout and residual; activation; and, where attention is not fused, scale,
mask and softmax, and dropout of the scores.
"""

from collections.abc import Sequence
from typing import Annotated

from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.planner.source import Source
from unisono.planner.timetables import of
from unisono.planner.work import expert_parallel
from unisono.planner.work.layouts import layout_of
from unisono.planner.work.stage import ITEM, Habits, MatrixProduct, PartPass, Transfer
from unisono.planner.work.transformer import Transformer, crossings

_COUNTED = Source(
    "specification", "kernels of PyTorch's eager mode with Megatron's fused norms and softmax, counted"
)
# Kernels that the host starts for one block.
FORWARD_LAUNCHES: Annotated[int, _COUNTED] = 20
BACKWARD_LAUNCHES: Annotated[int, _COUNTED] = 32
UNFUSED_LAUNCHES: Annotated[int, _COUNTED] = 4
_ROUNDED: Annotated[float, Source("specification", "two bytes read, twice, and one written")] = 5.0
# Products of the fused backward pass of attention for one of the forward pass: it computes the scores again.
FUSED_BACKWARD: Annotated[float, Source("specification", "five products for two; Dao et al., 2022")] = 2.5


def own_list(model: Transformer, habits: Habits) -> bool:
    """Whether our own GPT is counted: the software is ours, and the model one that we play."""
    return habits.autograd and model.experts is None and model.latent is None


def block(model: Transformer, plan: Plan, habits: Habits, micro_batch: float, *, backward: bool) -> PartPass:
    """One pass over one block; of dense and sparse blocks the mean. Backwards, without recomputation, each product has
    two of its own size."""
    passes = row_block if (layout := layout_of(plan)) is None else layout.block
    return passes(model, plan, habits, micro_batch, backward=backward)


def row_block(
    model: Transformer, plan: Plan, habits: Habits, micro_batch: float, *, backward: bool,
    products: tuple[MatrixProduct, ...] = (),
) -> PartPass:  # fmt: skip
    """One pass over one block whose layers lie on tp in one row. products: others than those of one row."""
    tokens, item = _tokens(model, plan, micro_batch), ITEM[plan.precision]
    products = products or tuple(_products(model, plan, tokens))
    scores, unfused = _scores(model, plan, habits, micro_batch)
    fused = _fused(model, plan, micro_batch) if habits.fused_attention else 0.0
    ways = 2 if backward else 1
    calls = [
        *_tensor_calls(model, plan, habits, micro_batch, backward),
        *(
            own_context_calls(model, plan, micro_batch, backward)
            if own_list(model, habits)
            else _context_calls(model, plan, micro_batch, item, ways)
        ),
    ]
    if model.experts:
        behind = "other" if of(plan.schedule).overlapped else ""
        sent = expert_parallel.calls(model, model.experts, plan, tokens, item, behind)
        calls += [call._replace(times=model.sparse_share * call.times) for call in sent]
    rounded = _rounded(products, 2 if backward else 1)
    beside = _adapters(products, model.lora)
    if backward:
        pairs = [product.gradients for product in products]
        products = tuple(to_x.in_chunks(plan.chunks) for to_x, _ in pairs)
        products += () if model.lora else tuple(to_weight for _, to_weight in pairs)
        beside = tuple(gradient for product in beside for gradient in product.gradients)
    else:
        products = tuple(product.in_chunks(plan.chunks) for product in products)
    products += beside
    return PartPass(
        products=products,
        scores=tuple(gradient._replace(times=2.0) for gradient in scores) if backward else scores,
        fused=fused * (FUSED_BACKWARD if backward else 1.0),
        moved=elementwise_bytes(model, plan, habits, tokens, backward)
        + rounded
        + unfused * (11 / 9 if backward else 1.0),
        masks=mask_bytes(model, plan, habits, tokens),
        kernels=(BACKWARD_LAUNCHES if backward else FORWARD_LAUNCHES)
        + (0 if habits.fused_attention else UNFUSED_LAUNCHES)
        + ways * model.sparse_share * expert_parallel.LAUNCHES,
        calls=tuple(calls),
    )


def again(model: Transformer, plan: Plan, habits: Habits, micro_batch: float) -> PartPass:
    """What the backward pass of one block computes once more: nothing, the scores, or the whole forward pass."""
    passes = row_again if (layout := layout_of(plan)) is None else layout.again
    return passes(model, plan, habits, micro_batch)


def row_again(model: Transformer, plan: Plan, habits: Habits, micro_batch: float) -> PartPass:
    """As `again`, where layers lie on tp in one row."""
    if plan.recompute == "full":
        ahead = block(model, plan, habits, micro_batch, backward=False)
        others = tuple(call for call in ahead.calls if call.label != "tp")
        return ahead.like(
            calls=(*_tensor_calls(model, plan, habits, micro_batch, False, again=True), *others)
        )
    sent = tuple(context_again(model, plan, micro_batch)) if own_list(model, habits) else ()
    if plan.recompute == "selective" and not habits.fused_attention:
        scores, unfused = _scores(model, plan, habits, micro_batch)
        # Of the two products, the scores; and the weighted values' inputs.
        half = tuple(product._replace(times=0.5) for product in scores)
        return PartPass(scores=half, moved=unfused, kernels=UNFUSED_LAUNCHES + 1, calls=sent)
    return PartPass(calls=sent)


def stem(model: Transformer, plan: Plan, micro_batch: float, *, backward: bool) -> PartPass:
    """The embedding: rows read and added, or gradients scattered. In one row an end sends little beside the blocks."""
    moved = _tokens(model, plan, micro_batch) * model.d_model * ITEM[plan.precision]
    row = PartPass(moved=moved * (8 if backward else 4))
    layout = layout_of(plan)
    return row if layout is None else layout.stem(row, model, plan, micro_batch, backward)


def head(model: Transformer, plan: Plan, habits: Habits, micro_batch: float, *, backward: bool) -> PartPass:
    """The classifier and the loss."""
    tokens = _tokens(model, plan, micro_batch)
    times = 2.0 if backward and not model.lora else 1.0
    product = MatrixProduct(tokens, model.d_model, model.vocab / plan.tp, times=times)
    if habits.fused_loss:  # cast, and one kernel; their gradient
        moved = 6 if backward else 14
    else:  # in fp32, kernel by kernel: cast, maximum, difference, exponential, sum, quotient; their gradient
        moved = 14 if backward else 38
    row = PartPass(products=(product,), moved=tokens * model.vocab / plan.tp * moved)
    layout = layout_of(plan)
    return row if layout is None else layout.head(row, model, plan, micro_batch, backward)


def _adapters(products: Sequence[MatrixProduct], rank: int) -> tuple[MatrixProduct, ...]:
    """Return the products of adapters beside `products`: two layers with `rank` features between them (Hu et al.,
    2021)."""
    if not rank:
        return ()
    pairs = ((p._replace(columns=rank, eight=False), p._replace(inner=rank, eight=False)) for p in products)
    return tuple(product for pair in pairs for product in pair)


def _rounded(products: Sequence[MatrixProduct], ways: int) -> float:
    """Bytes moved to round both factors of products in eight bits: read for the largest of each row, read again,
    written. ways: 2 backwards, where both factors of two products are rounded anew along the other dim."""
    each = (p for p in products if p.eight)
    left_right_out = ((p.rows * p.inner, p.inner * p.columns, p.rows * p.columns, p.times) for p in each)
    return _ROUNDED * sum(t * (a + b + (2 * c if ways == 2 else 0.0)) for a, b, c, t in left_right_out)


def _tokens(model: Transformer, plan: Plan, micro_batch: float) -> float:
    return micro_batch * model.context / plan.cp


def _products(model: Transformer, plan: Plan, tokens: float) -> list[MatrixProduct]:
    """Return the products of a block that have weights."""
    h, t = model.d_model, plan.tp
    products = [
        MatrixProduct(tokens, inner / (t if row_wise else 1), columns / (t if column_wise else 1))
        for inner, columns, row_wise, column_wise in model.attention_products
    ]
    if model.sparse_share < 1.0:
        dense = 1.0 - model.sparse_share
        products.append(MatrixProduct(tokens, h, model.d_ff * (2 if model.gated else 1) / t, times=dense))
        products.append(MatrixProduct(tokens, model.d_ff / t, h, times=dense))
    if plan.arithmetic.fp8:
        products = [product._replace(eight=True) for product in products]
    if model.experts:
        each = expert_parallel.products(model, model.experts, tokens, t, plan.ep)
        products += [MatrixProduct(*shape, times=model.sparse_share) for shape in each]
    return products


def _scores(
    model: Transformer, plan: Plan, habits: Habits, micro_batch: float
) -> tuple[tuple[MatrixProduct, ...], float]:
    """(products of attention that writes its scores, bytes that softmax and dropout move between them)."""
    if habits.fused_attention:
        return (), 0.0
    s, many, (inner, width) = model.context, micro_batch * model.n_head / plan.tp, model.score_widths
    rows, item = s / plan.cp, ITEM[plan.precision]
    each = 2 * item + (2 * item + 1 if model.noisy else 0)
    return (MatrixProduct(rows, inner, s, many), MatrixProduct(rows, s, width, many)), each * many * rows * s


def _fused(model: Transformer, plan: Plan, micro_batch: float) -> float:
    """FLOPs of attention that never writes its scores: half of them are masked, and not computed."""
    rows = model.context / plan.cp
    return 2.0 * micro_batch * rows * model.context * model.n_head / plan.tp * sum(model.score_widths) / 2.0


def elementwise_bytes(model: Transformer, plan: Plan, habits: Habits, tokens: float, backward: bool) -> float:
    """Bytes of a block's elementwise kernels beside attention, without masks."""
    h, e, tp = model.d_model, ITEM[plan.precision], plan.tp
    norms, joins = 2 * (4 if backward else 2) * e, 2 * 3 * e
    active = ((5 if model.gated else 3) if backward else (3 if model.gated else 2)) * e
    turned = 2 * e * model.qkv_width  # heads are moved to the front
    hidden = active * model.d_ff * (1.0 - model.sparse_share)
    routed = 0.0
    if model.experts:
        routed = expert_parallel.moved(model, model.experts, tokens, tp, plan.ep, e, active)
    shared = tp if habits.sequence_parallel or isinstance(tp, Grid) else 1
    return tokens * ((norms + joins) * h / shared + (hidden + turned) / tp) + model.sparse_share * routed


def mask_bytes(model: Transformer, plan: Plan, habits: Habits, tokens: float) -> float:
    """Bytes of dropout's masks beside attention."""
    shared = plan.tp if habits.sequence_parallel or isinstance(plan.tp, Grid) else 1
    return tokens * 2 * model.d_model / shared if model.noisy else 0.0


def _reduces(model: Transformer, plan: Plan) -> float:
    """All-reduces of activations on tp in one pass over the mean block; a gather and a scatter of sequence parallelism
    are one. Tokens of a sparse layer go to their experts by all-to-all instead."""
    experts = model.experts
    return 2.0 - (
        model.sparse_share if experts is not None and plan.ep > 1 and not experts.shared_width else 0.0
    )


def _tensor_calls(
    model: Transformer, plan: Plan, habits: Habits, micro_batch: float, backward: bool, again: bool = False
) -> list[Transfer]:
    """What crosses tp in one pass: as our own program makes it, or all-reduces."""
    if plan.tp == 1:
        return []
    if isinstance(plan.tp, Grid) and (layout := layout_of(plan)) is not None:
        return layout.block_calls(model, plan, micro_batch, backward, again)
    tokens = _tokens(model, plan, micro_batch)
    behind = "backward" if backward else ""
    if own_list(model, habits):
        return own_tensor_calls(model, plan, tokens, backward, again)
    whole, times = tokens * model.d_model * ITEM[plan.precision], _reduces(model, plan)
    calls = [Transfer("tp", "all_reduce", whole, times, behind=behind).in_chunks(plan.chunks)]
    if backward and habits.sequence_parallel:
        # The first product's input is gathered once more for its weight's gradient.
        calls.append(Transfer("tp", "all_gather", whole, times, behind=behind))
    return calls


def own_context_calls(
    model: Transformer, plan: Plan, micro_batch: float, backward: bool
) -> list[Transfer]:  # fmt: skip
    """What a block of ours sends on cp. Gradients on their way are summed in fp32 at least."""
    if plan.cp == 1:
        return []
    item = ITEM[plan.precision]
    calls = _context_calls(model, plan, micro_batch, item, 2 if backward else 1)
    wide = max(4, item) / item
    if backward and plan.cp_kind == "ring":  # keys and values, and their gradients
        both = calls[0]._replace(nbytes=calls[0].nbytes / 2)
        calls = [both, both._replace(nbytes=wide * both.nbytes)]
    elif backward:
        calls = [c._replace(nbytes=c.nbytes * (wide if c.op == "reduce_scatter" else 1.0)) for c in calls]
    return calls


def context_again(model: Transformer, plan: Plan, micro_batch: float) -> list[Transfer]:
    """Return what one of our blocks sends on cp while its backward pass recomputes. Where attention alone is
    recomputed, its result is not exchanged, since nobody needs it."""
    calls = own_context_calls(model, plan, micro_batch, False)
    return calls[: {"full": len(calls), "selective": 1}.get(plan.recompute, 0)]


def own_tensor_calls(
    model: Transformer, plan: Plan, tokens: float, backward: bool, again: bool = False
) -> list[Transfer]:
    """What a block of ours gathers and scatters on tp, the other way round backwards."""
    ops = ("reduce_scatter", "all_gather") if backward else ("all_gather", "reduce_scatter")
    # A product in chunks keeps its input once it has sent its output, so all of it is done again.
    stops = again and plan.chunks == 1
    wide = backward and not plan.arithmetic.narrow  # gradients of what norms give are as norms' weights
    crossed = list(crossings(model, filled(model, plan, tokens), ITEM[plan.precision], wide, stops))
    behind = "backward" if backward else ""
    lent = 2 * plan.tp * tokens * model.kv_width / model.kv_heads * ITEM[plan.precision]
    return [
        *(
            Transfer("tp", op, nbytes, times, behind=behind).in_chunks(plan.chunks)
            for op, (nbytes, times) in zip(ops, crossed, strict=True)
        ),
        Transfer("tp", ops[0], lent, lends(model, plan.tp), behind=behind),
    ]


def lends(model: Transformer, ranks: int) -> float:
    """Return how often ranks that split heads lend each other a key and a value in one pass: 1.0 where the queries of
    one key lie on several ranks."""
    group = model.n_head // model.kv_heads
    ends = (rank * (model.n_head // ranks) + min(rank, model.n_head % ranks) for rank in range(1, ranks))
    return float(any(end % group for end in ends))


def filled(model: Transformer, plan: Plan, tokens: float) -> float:
    """Tokens that travel on tp: shorter slices of positions are filled up to the longest one."""
    here = model.context // plan.cp
    return tokens if here % plan.tp == 0 else tokens * plan.tp * -(-here // plan.tp) / here


def _context_calls(
    model: Transformer, plan: Plan, micro_batch: float, item: int, ways: int
) -> list[Transfer]:
    """What crosses cp for one block in one direction. ways: 1 forward, 2 backward, where round a ring keys and values
    come again and their gradients go round.

    Ring: keys and values go round while scores are computed (Liu et al., 2023). Ulysses: all-to-alls of queries, keys
    and values before attention and of results after it, which nothing hides (Jacobs et al., 2023). Gather: keys and
    values are gathered in both directions, and their gradients scattered (Grattafiori et al., 2024).
    """
    if plan.cp == 1:
        return []
    if plan.cp_kind == "gather":
        whole = 2 * micro_batch * model.context * model.kv_width / plan.tp * item
        return [Transfer("cp", op, whole) for op in ("all_gather", "reduce_scatter")[:ways]]
    if plan.cp_kind == "ulysses":
        tokens = _tokens(model, plan, micro_batch)
        widths = model.qkv_width, model.attended - model.qkv_width
        return [Transfer("cp", "all_to_all", tokens * width / plan.tp * item) for width in widths]
    moved = ways * 2 * micro_batch * model.context * model.kv_width / plan.tp * item
    return [Transfer("cp", "ring", moved, behind="scores")]
