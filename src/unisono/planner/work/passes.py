"""Elements of one block that a rank of ours holds, and elements that a stage hands on."""

from unisono.plan import Plan
from unisono.planner.grouping import in_order
from unisono.planner.machines.order import virtual_of
from unisono.planner.work.expert_parallel import held_experts
from unisono.planner.work.transformer import Transformer, on_rank


def handed_elements(model: Transformer, plan: Plan) -> float:
    """Return the elements of one sample that a stage hands on. Under virtual shards positions are whole on tp."""
    return model.context * model.d_model / (plan.tp if virtual_of(plan) == 1 else 1) / plan.cp


def dealt_elements(model: Transformer, plan: Plan) -> float:
    """Return the elements of one block that `shard` shards and gathers at once; of dense and sparse blocks the mean."""
    experts, (dealt, whole) = held_experts(model, plan), model.block_parameters
    routed = 0.0 if experts.apart else experts.matrices + experts.biases
    return on_rank(plan.tp, dealt, whole) + model.sparse_share * routed


def each_block(model: Transformer, plan: Plan, blocks: float, row: int) -> list[tuple[Plan, float]]:
    """Return, for each block of a row, (the plan that plays all blocks so, its part of `blocks`). blocks: a total of
    the row, split by elements."""
    ways = in_order(model, plan, row)
    weights = [dealt_elements(model, way) for way in ways]
    each = blocks / sum(weights)  # of rows with two copies of their blocks, and of uneven ones the mean
    return [(way, each * weight) for way, weight in zip(ways, weights, strict=True)]
