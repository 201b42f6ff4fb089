"""What the sparse layers of our own models send: tokens to their experts and back, and sums of the experts' gradients.

tests/planner/test_calls.py holds it to what ranks record: how often to the call, bytes too, but for those of tokens,
which depend on where routers send them: they are those of experts that are alike in load.
"""

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from unisono.plan import Plan
from unisono.planner.source import Source
from unisono.planner.work.experts import matrices
from unisono.planner.work.stage import ITEM, Transfer
from unisono.planner.work.transformer import Transformer

_RUNTIME = Source("specification", "models.moe.routing: numbers and loads are int64, what is kept is bool")
INDEX: Annotated[float, _RUNTIME] = 8.0  # bytes of the number of an expert
FLAG: Annotated[float, _RUNTIME] = 1.0  # of whether a choice is kept
COUNT: Annotated[float, _RUNTIME] = 8.0  # of a load
_TOLD = Source("specification", "models.moe.routing.PARTS, counted")
TOLD: Annotated[int, _TOLD] = 4  # numbers that a router tells of a step beside its loads


class HeldExperts(NamedTuple):
    """Of one sparse layer on one rank, elements: of matrices, and of biases, which those who share an expert have in
    full. apart: `shard` does not deal them."""

    matrices: float
    biases: float
    apart: bool


def held_experts(model: Transformer, plan: Plan) -> HeldExperts:
    """Of a model without experts, nothing."""
    some = model.experts
    if some is None:
        return HeldExperts(0.0, 0.0, False)
    each = matrices(model.gated) * model.d_model * some.width
    flat = (matrices(model.gated) - 1) * some.width + model.d_model if model.bias else 0
    cut = max(1, plan.tp // plan.ep)
    dealt = plan.ep * plan.tp > 1
    over = dealt and plan.shard > 1 and (plan.cp * plan.tp % plan.ep > 0 or plan.cp > 1)
    return HeldExperts(some.count * each / (plan.ep * cut), some.count * flat / plan.ep, over)


def expert_rows(model: Transformer) -> float:
    """Of all parameters of a sparse layer, counted along their first dim."""
    some = model.experts
    if some is None:
        return 0.0
    ups = matrices(model.gated) - 1
    flat = some.count * (ups * some.width + model.d_model) if model.bias else 0
    shared = (ups * some.shared_width + model.d_model) * (2 if model.bias else 1) if some.shared_width else 0
    return some.count + (ups + 1) * some.count + flat + shared


def layer_calls(model: Transformer, plan: Plan, micro_batch: float, backward: bool) -> Iterator[Transfer]:
    """In one pass over one sparse layer."""
    some, cut = model.experts, max(1, plan.tp // plan.ep)
    if some is None or plan.ep * plan.tp == 1:
        return
    narrow, wide = ITEM[plan.precision], max(4, ITEM[plan.precision])
    rows = micro_batch * model.context / plan.cp / plan.tp * cut  # tokens of those who share an expert
    if cut > 1:
        axis = "cut" if plan.ep > 1 else "tp"
        chosen, whole = rows * some.top_k, rows * model.d_model
        if backward:
            yield Transfer(axis, "all_gather", narrow * whole)
            yield Transfer(axis, "reduce_scatter", wide * whole)
            yield Transfer(axis, "reduce_scatter", wide * chosen)
        else:
            yield Transfer(axis, "all_gather", INDEX * chosen)
            yield Transfer(axis, "all_gather", FLAG * chosen)
            yield Transfer(axis, "all_gather", wide * chosen)
            yield Transfer(axis, "all_gather", narrow * whole)
            yield Transfer(axis, "reduce_scatter", narrow * whole)
    if plan.ep > 1:
        yield Transfer("ep", "all_to_all", rows * some.top_k * model.d_model * narrow, 2.0)
        if not backward:
            yield Transfer("ep", "all_to_all", COUNT * some.count)


def leaf_calls(model: Transformer, plan: Plan, micro_batch: float) -> Iterator[Transfer]:
    """What a router asks of the ranks that have other positions of its leaf, in a forward pass: the choices or the
    scores of all tokens, where experts have room for some; the counts that a balancing loss weighs."""
    some, ranks = model.experts, plan.cp * plan.tp
    if some is None or ranks == 1:
        return
    axis = "+".join(name for name in ("cp", "tp") if getattr(plan, name) > 1)
    wide = max(4, ITEM[plan.precision])
    # Of a slice of positions as long as the longest.
    tokens = micro_batch * ranks * -(-model.context // ranks)
    if some.choosing:
        yield Transfer(axis, "all_gather", tokens * some.count * wide)
    elif some.capacity:
        yield Transfer(axis, "all_gather", tokens * some.top_k * INDEX)
    if some.weighed:
        yield Transfer(axis, "all_reduce", some.count * wide)


def again_calls(model: Transformer, plan: Plan, micro_batch: float) -> Iterator[Transfer]:
    """In a forward pass that is computed again: it ends before the last sum where nothing behind it is kept."""
    made = list(layer_calls(model, plan, micro_batch, False))
    shared = model.experts is not None and model.experts.shared_width
    ends = not model.noisy and not shared
    yield from (call for call in made if not (ends and call.op == "reduce_scatter"))


def without_experts(
    model: Any, plan: Plan, blocks: float, elements: float, item: float
) -> tuple[float, list[tuple[Transfer, float]]]:
    """Of the elements of one rank before `shard` deals them: those that are no dealt experts'; and for these the sum of
    their gradients inside the replica, once a step, with the elements that cross `dp` then."""
    if getattr(model, "experts", None) is None or plan.ep * plan.tp == 1:
        return elements, []
    own, layers = held_experts(model, plan), blocks * model.sparse_share
    among = 1 if own.apart else plan.shard
    kinds = [("experts", own.matrices + own.biases)]
    if plan.tp > plan.ep:
        kinds = [("experts", own.matrices), ("expert", own.biases)]
    if not own.apart:
        elements -= layers * (own.matrices + own.biases)
    each = [(axis, layers * some / among) for axis, some in kinds if some]
    return elements, [(Transfer(axis, "all_reduce", item * some), some) for axis, some in each]
