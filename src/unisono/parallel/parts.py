"""Which part of what is dealt lies on one rank."""

from dataclasses import dataclass
from itertools import pairwise

from unisono.comm.group import Group
from unisono.spec.layout import Units


@dataclass(frozen=True, slots=True)
class Cut:
    """This rank's part of one parameter: rows or columns start : start + size of `dim`, of `full` in all."""

    dim: int
    start: int
    size: int
    full: int


@dataclass(frozen=True, slots=True)
class Dealt:
    """This rank's part of one parameter of experts: `cuts` of the whole, one after the other. apart: it stays outside
    of FSDP. sum_over, group: the ranks that hold it too, each with a part of its gradient."""

    cuts: tuple[Cut, ...]
    apart: bool
    sum_over: str
    group: Group


def part_of(full: int, group: Group) -> tuple[int, int]:
    """(start, size) of this rank's part; the first `full % size` ranks hold one more."""
    base, more = divmod(full, group.size)
    start = group.index * base + min(group.index, more)
    return start, base + (group.index < more)


def ends_of(full: int, ranks: int) -> list[int]:
    """The beginning of each rank's part of `full`, and the end of the last one."""
    base, more = divmod(full, ranks)
    return [i * base + min(i, more) for i in range(ranks + 1)]


def longest(ends: list[int]) -> int:
    """The size of the longest part."""
    return max(b - a for a, b in pairwise(ends))


def features_of(units: Units, group: Group) -> tuple[int, int]:
    """(start, size) of this rank's features, which are whole units."""
    start, size = part_of(units.count, group)
    first = units.before(start)
    return first, units.before(start + size) - first
