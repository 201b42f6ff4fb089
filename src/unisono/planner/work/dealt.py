"""What a rank of our own models holds of the experts of a sparse layer."""

from typing import Annotated, NamedTuple

from unisono.plan import Plan
from unisono.planner.source import Source
from unisono.planner.work.experts import matrices
from unisono.planner.work.transformer import Transformer

_RUNTIME = Source("specification", "models.moe.routing: numbers and loads are int64, what is kept is bool")
INDEX: Annotated[float, _RUNTIME] = 8.0  # bytes of the number of an expert
FLAG: Annotated[float, _RUNTIME] = 1.0  # of whether a choice is kept


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
