"""Which axis of a plan lies innermost, and so how far apart the ranks of an axis are.

Ranks are numbered along the axes of an order, the innermost first: neighbours in rank order differ in that one.
"""

from functools import cache

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.plan.grid import columns_of

Order = tuple[str, ...]  # of all axes, the innermost first
USUAL: Order = ("tp", "cp", "shard", "dp", "pp")  # the contract's, which `train` plays


def stride(plan: Plan, axis: str, order: Order = USUAL) -> int:
    """How far apart neighbours on an axis are in rank order: the ranks of all axes inside it."""
    if axis == "ep":
        return _experts(plan, order)
    if axis in ("row", "column"):  # of a grid of tp
        return stride(plan, "tp", order) * (columns_of(plan.tp) if axis == "column" else 1)
    apart = 1
    for inner in order[: order.index(axis)]:
        apart *= getattr(plan, inner)
    return apart


def virtual_of(plan: Plan) -> int:
    """Virtual shards by which every layer is computed, 1: layers as they are."""
    return _virtual_in(plan.sync)


@cache
def _virtual_in(sync: str) -> int:
    return getattr(member("sync", sync), "virtual", 1)


def dealers(plan: Plan) -> int:
    """Return the number of ranks that shard parameters and optimiser states: those of shard and cp. Under virtual
    shards cp is not among them, since each pass has added up its gradients."""
    if plan.shard == 1:
        return 1
    return plan.shard * (plan.cp if virtual_of(plan) == 1 else 1)


def owners(plan: Plan, order: Order = USUAL) -> tuple[int, int]:
    """Return (ranks that shard what ZeRO shards, how far apart they are): those of shard and cp, which hold the same
    weights, as in (shard x cp) meshes of FSDP; (1, 1) where shard is 1."""
    ranks = dealers(plan)
    if ranks == 1:
        return 1, 1
    axes = [axis for axis in ("shard", "cp")[: 1 if ranks == plan.shard else 2] if getattr(plan, axis) > 1]
    outer = max(stride(plan, axis, order) * getattr(plan, axis) for axis in axes)
    return ranks, outer // ranks


def of_many(plan: Plan, order: Order) -> tuple[str, ...]:
    """The axes of more than one rank, the innermost first."""
    return tuple(axis for axis in order if getattr(plan, axis) > 1)


def evenly(plan: Plan, order: Order) -> bool:
    """Whether the ranks that `ep` re-uses lie evenly apart: tp's, and of cp and shard where it reaches further."""
    left, end = plan.ep, 0
    for axis in ("tp", "cp", "shard"):
        size = getattr(plan, axis)
        if left <= 1:
            return True
        if size == 1:
            continue
        here = stride(plan, axis, order)
        if end and here != end:
            return False
        end, left = here * size, -(-left // size)
    return True


def _experts(plan: Plan, order: Order) -> int:
    """`ep` takes ranks of tp first, the outer ones where tp has more; what is left of tp cuts each expert."""
    inner = next((axis for axis in ("tp", "cp", "shard") if getattr(plan, axis) > 1), "tp")
    return stride(plan, inner, order) * max(1, plan.tp // plan.ep)
