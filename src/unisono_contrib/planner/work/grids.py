"""Work of ranks of `tp=RxC` (`parallel.grid`): products whose factors meet along rows and columns.

Ranks of a row have the same samples and split features; ranks of a column have the same features and split samples.
Each product gathers its input along the row and its weight along the column, backward once more, and scatters both
gradients. Sizes that do not divide are padded, and the longest part is counted.
"""

from collections.abc import Iterator
from math import ceil
from typing import Annotated, NamedTuple

from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.planner.source import Source
from unisono.planner.work import wire_formats
from unisono.planner.work.blocks import lends, row_again, row_block
from unisono.planner.work.stage import ITEM, Habits, MatrixProduct, PartPass, Transfer
from unisono.planner.work.transformer import Transformer

_COUNTED = Source("specification", "kernels of parallel.grid beside collectives, counted")
# Of a product that meets: casts and copies of both factors, backward of both gradients too.
MEETING_KERNELS: Annotated[tuple[int, int], _COUNTED] = (4, 10)
# Of a norm over features that are dealt, beside the one of a whole norm.
NORM_KERNELS: Annotated[tuple[int, int], _COUNTED] = (8, 12)
# What a tensor that was gathered, or will be scattered, is read and written to lie in the order of its dim.
_COPIED: Annotated[float, _COUNTED] = 2.0


class DealtProduct(NamedTuple):
    """A product of a block or a head. inner, columns: whole. unit: of the inner ones, how many stay together. normed:
    it reads what a norm gives, which is wide under autocast. attends: keys may be lent behind it."""

    inner: int
    columns: int
    unit: int = 1
    bias: bool = False
    normed: bool = True
    attends: bool = False


def grid_of(plan: Plan) -> Grid:
    """The plan's. Raises ValueError where it has none."""
    if not isinstance(plan.tp, Grid):
        raise ValueError(f"tp={plan.tp} is no grid")
    return plan.tp


def of_block(model: Transformer) -> list[DealtProduct]:
    """The products of a block with weights."""
    h, wide = model.d_model, model.n_head * model.head_width
    return [
        DealtProduct(h, model.qkv_width, bias=model.bias, attends=True),
        DealtProduct(wide, h, model.head_width, model.bias, normed=False),
        *[DealtProduct(h, model.d_ff, bias=model.bias)] * (2 if model.gated else 1),
        DealtProduct(model.d_ff, h, bias=model.bias, normed=False),
    ]


def of_head(model: Transformer) -> DealtProduct:
    return DealtProduct(model.d_model, model.vocab)


def tokens_of(model: Transformer, plan: Plan, micro_batch: float) -> float:
    """Return the tokens of a micro-batch on the row that has the most samples."""
    return ceil(micro_batch / grid_of(plan).rows) * model.context / plan.cp


def products(model: Transformer, plan: Plan, micro_batch: float) -> list[MatrixProduct]:
    """Return a block's products on one rank: its row's samples, all inputs, its column's outputs."""
    tokens, columns = tokens_of(model, plan, micro_batch), grid_of(plan).columns
    return [MatrixProduct(tokens, product.inner, product.columns / columns) for product in of_block(model)]


def copied(model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> float:
    """Bytes that a block moves to put in order what its products gather, and backward what they scatter."""
    tokens, grid, e = tokens_of(model, plan, micro_batch), grid_of(plan), ITEM[plan.precision]
    met = sum(
        tokens * product.inner + product.inner * product.columns / grid.columns for product in of_block(model)
    )
    return _COPIED * met * (e + max(4, e) if backward else e)


def kernels(model: Transformer, backward: bool) -> float:
    """Return the kernels that a block starts beyond those of a block in one row."""
    return len(of_block(model)) * MEETING_KERNELS[backward] + 2 * NORM_KERNELS[backward]


def block(model: Transformer, plan: Plan, habits: Habits, micro_batch: float, *, backward: bool) -> PartPass:
    """One pass over one block: that of one row, with other products and calls, and with copies beside it."""
    shapes = tuple(products(model, plan, micro_batch))
    row = row_block(model, plan, habits, micro_batch, backward=backward, products=shapes)
    moved = row.moved + copied(model, plan, micro_batch, backward)
    return row.like(moved=moved, kernels=row.kernels + kernels(model, backward))


def again(model: Transformer, plan: Plan, habits: Habits, micro_batch: float) -> PartPass:
    """What the backward pass of one block computes once more: as in one row, which calls `block` and `block_calls`."""
    return row_again(model, plan, habits, micro_batch)


def stem(row: PartPass, model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> PartPass:
    """The embedding, whose tables meet. row: that of one row."""
    return row.like(calls=tuple(end_calls(model, plan, micro_batch, backward, stem=True, head=False)))


def head(row: PartPass, model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> PartPass:
    """The classifier and the loss. row: those of one row."""
    (whole,), grid = row.products, grid_of(plan)
    product = whole._replace(rows=whole.rows / grid.rows, columns=model.vocab / grid.columns)
    calls = tuple(end_calls(model, plan, micro_batch, backward, stem=False, head=True))
    return row.like(products=(product,), calls=calls)


def block_calls(
    model: Transformer, plan: Plan, micro_batch: float, backward: bool, again: bool = False
) -> list[Transfer]:
    """Return the calls of one block. again: of a recomputed pass, which ends with the last tensor that is kept."""
    calls = [call for _ in range(2) for call in _norm(model, plan, micro_batch, backward)]
    for product in of_block(model):
        calls += _product(model, plan, product, micro_batch, backward)
    if again and not model.noisy and model.bias:  # the last bias is added after it
        calls.pop()
    return calls


def end_calls(
    model: Transformer, plan: Plan, micro_batch: float, backward: bool, *, stem: bool, head: bool
) -> list[Transfer]:
    """Return the calls of the ends that are here: the tables; the last norm, the classifier and the loss."""
    grid, wide, calls = grid_of(plan), float(max(4, ITEM[plan.precision])), list[Transfer]()
    tokens, width = tokens_of(model, plan, micro_batch), model.d_model
    there, back = ("reduce_scatter", "all_gather") if backward else ("all_gather", "reduce_scatter")
    if stem:
        table = _filled(width, grid.rows) * ceil(model.vocab / grid.columns)
        held = wire_formats.carried(plan, wide)
        calls.append(Transfer("column", there, table * held))
        calls.append(Transfer("row", back, tokens * _filled(width, grid.columns) * held))
        if model.learned:
            rows = _filled(model.rows or model.context, grid.rows)
            calls.append(Transfer("column", there, rows * width / grid.columns * held))
    if head:
        calls += _norm(model, plan, micro_batch, backward)
        calls += _product(model, plan, of_head(model), micro_batch, backward)
        if not backward:  # the largest logit, the sum and the target's; then one number of all samples
            calls.append(Transfer("row", "all_reduce", tokens * wide))
            calls.append(Transfer("row", "all_reduce", 2 * tokens * wide))
            calls.append(Transfer("column", "all_reduce", wide))
    return calls


def _norm(model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> Iterator[Transfer]:
    """Its moments, and its vectors."""
    wide, tokens = float(max(4, ITEM[plan.precision])), tokens_of(model, plan, micro_batch)
    if backward:
        yield Transfer("row", "all_reduce", 2 * tokens * wide)
    else:
        yield Transfer("row", "all_reduce", tokens * wide, 1.0 if model.rms else 2.0)
    vectors = 2.0 if model.bias and not model.rms else 1.0
    yield _vector(plan, model.d_model, backward)._replace(times=vectors)


def _product(
    model: Transformer, plan: Plan, product: DealtProduct, micro_batch: float, backward: bool
) -> Iterator[Transfer]:
    """Its factors on their way, and backward their gradients."""
    grid, e, tokens = grid_of(plan), float(ITEM[plan.precision]), tokens_of(model, plan, micro_batch)
    wide = wire_formats.carried(plan, max(4.0, e))  # as weights are held
    left = tokens * _filled(product.inner, grid.columns, product.unit)
    right = _filled(product.inner, grid.rows) * product.columns / grid.columns
    yield Transfer("row", "all_gather", left * e)
    yield Transfer("column", "all_gather", right * e)
    if backward:
        yield Transfer("row", "reduce_scatter", left * (wide if product.normed else e))
        yield Transfer("column", "reduce_scatter", right * wide)
    if product.attends and lends(model, grid.columns):
        lent = 2 * grid.columns * tokens * model.kv_width / model.kv_heads
        yield Transfer("row", "reduce_scatter" if backward else "all_gather", lent * e)
    if product.bias:
        yield _vector(plan, product.columns, backward)


def _vector(plan: Plan, width: int, backward: bool) -> Transfer:
    """Return the call of a vector of so many features, or of its gradient."""
    grid, wide = grid_of(plan), wire_formats.carried(plan, max(4, ITEM[plan.precision]))
    length = _filled(ceil(width / grid.columns), grid.rows)
    return Transfer("column", "reduce_scatter" if backward else "all_gather", float(length * wide))


def _filled(size: int, ranks: int, unit: int = 1) -> int:
    """Return `size` padded so that each of the ranks sends as many places as the fullest."""
    return ranks * unit * ceil(size / unit / ranks)
