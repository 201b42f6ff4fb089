"""Bytes of an element on `shard` and between stages, where the plan sends it in another format than it is kept in."""

from typing import Annotated

from unisono.plan import Plan
from unisono.plan.options import BLOCK
from unisono.planner.source import Source

_BYTES = Source("specification", "a byte an element, and a scale for each group of them")
EIGHT_BITS: Annotated[float, _BYTES] = (
    1.0 + 4.0 / BLOCK
)  # a code, and its part of a block's scale; vectors, a few in a thousand, count alike


def gathered(plan: Plan, item: float) -> float:
    """Return bytes of a gathered weight that is kept in `item` bytes."""
    narrow = min(item, 2.0) if plan.arithmetic.narrow else item
    return EIGHT_BITS if plan.wires.gather else narrow


def scattered(plan: Plan, item: float) -> float:
    """Return bytes of a scattered gradient that is kept in `item` bytes."""
    return EIGHT_BITS if plan.wires.scatter else item


def carried(plan: Plan, item: float) -> float:
    """Return bytes of an activation that crosses from stage to stage."""
    return min(item, 2.0) if plan.arithmetic.narrow else item


def scatter(plan: Plan) -> str:
    """The operation by which gradients are scattered: codes of several ranks cannot be added up on their way."""
    return "all_to_all" if plan.wires.scatter else "reduce_scatter"
