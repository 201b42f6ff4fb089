"""Which axis of a plan lies innermost, and so how far apart the ranks of an axis are.

Ranks are numbered along the axes of an order, the innermost first: neighbours in rank order differ in that one.
"""

from typing import Protocol

Order = tuple[str, ...]  # of all axes, the innermost first
USUAL: Order = ("tp", "cp", "shard", "dp", "pp")  # the contract's, which `train` plays


class AxisSizes(Protocol):
    """What has a size for each axis: a plan."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def shard(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def pp(self) -> int: ...


def stride(sizes: AxisSizes, axis: str, order: Order = USUAL) -> int:
    """How far apart neighbours on an axis are in rank order: the ranks of all axes inside it."""
    if axis == "ep":
        return _experts(sizes, order)
    apart = 1
    for inner in order[: order.index(axis)]:
        apart *= getattr(sizes, inner)
    return apart


def of_many(sizes: AxisSizes, order: Order) -> tuple[str, ...]:
    """The axes of more than one rank, the innermost first."""
    return tuple(axis for axis in order if getattr(sizes, axis) > 1)


def trains(sizes: AxisSizes, order: Order) -> bool:
    """Whether `train` numbers ranks so; where an axis of one rank stands makes no difference."""
    return of_many(sizes, order) == of_many(sizes, USUAL)


def evenly(sizes: AxisSizes, order: Order) -> bool:
    """Whether the ranks that `ep` re-uses lie evenly apart: tp's, and of cp and shard where it reaches further."""
    left, end = sizes.ep, 0
    for axis in ("tp", "cp", "shard"):
        size = getattr(sizes, axis)
        if left <= 1:
            return True
        if size == 1:
            continue
        here = stride(sizes, axis, order)
        if end and here != end:
            return False
        end, left = here * size, -(-left // size)
    return True


def _experts(sizes: AxisSizes, order: Order) -> int:
    """`ep` takes ranks of tp first, the outer ones where tp has more; what is left of tp cuts each expert."""
    inner = next((axis for axis in ("tp", "cp", "shard") if getattr(sizes, axis) > 1), "tp")
    return stride(sizes, inner, order) * max(1, sizes.tp // sizes.ep)


def coordinates(sizes: AxisSizes, place: int, order: Order = USUAL) -> dict[str, int]:
    """Axis -> coordinate of the rank at a place in rank order."""
    at: dict[str, int] = {}
    for axis in order:
        place, at[axis] = divmod(place, getattr(sizes, axis))
    return at


def rank_at(sizes: AxisSizes, place: int, order: Order) -> int:
    """The usual number of the rank that lies at a place in another order."""
    at = coordinates(sizes, place, order)
    return sum(at[axis] * stride(sizes, axis) for axis in USUAL)
