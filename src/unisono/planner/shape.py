"""What a network without switches for every pair leaves of a device's bandwidth: groups that interleave share cables, a
line has no way back, and two halves of a group talk over the cables between them."""

from functools import lru_cache
from math import log2

from unisono.planner.machines.cluster import CUBE, Link

_DIMS = {"ring": 1, "torus2d": 2, "torus3d": 3, "mesh2d": 2, "mesh3d": 3}
_OPEN = ("mesh2d", "mesh3d")  # without the way round
# Cables between the devices of a DGX-1: NVIDIA, DGX-1 with Tesla V100, system architecture, 2017, figure 4; as
# `nvidia-smi topo -m` prints it there.
_ALONE = {frozenset(pair) for pair in ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))}
_TWICE = {frozenset(pair) for pair in ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))}
_CABLES = 6  # of one device


def sides(units: int, dims: int) -> tuple[int, ...]:
    """`units` as a product of `dims` numbers as near to each other as can be, the smallest first."""
    if dims == 1:
        return (units,)
    side = max(d for d in range(1, round(units ** (1.0 / dims) + 1e-9) + 1) if units % d == 0)
    return tuple(sorted((side, *sides(units // side, dims - 1))))


def group(link: Link, devices: int, within: int, stride: int, ways: int) -> tuple[float, float]:
    """(share of a device's bandwidth, hops of one way round) for a group's ring over `ways` units of the level.

    Along a side of a torus, members s units apart share each cable with the s - 1 groups between them; where they do
    not fill the side, or it is a mesh's, the ring's way back takes the second direction. Sides that the group spans
    work at the same time. Through a tree a ring takes each cable once a way, and groups that interleave share the
    cables at its top. In a full mesh a group has the cables between its members alone.
    """
    if link.topology == "tree":
        apart = max(1, stride // within)
        return 1.0 / apart, _climbed(ways, apart)
    if link.topology == "full-mesh":
        return _meshed(link, devices, within, ways), float(ways - 1)
    if link.topology == "hybrid-cube":
        reached, _, hops = _cube(_units(link, devices, within), stride, ways)
        return reached, hops
    if link.topology not in _DIMS:
        return 1.0, float(ways - 1)
    reached, hops = 0.0, 0.0
    for members, apart, closed in _spanned(link, devices, within, stride, ways):
        reached += (1.0 if closed else 0.5) / apart / _DIMS[link.topology]
        hops += (members - 1) * apart
    return (reached, hops) if reached else (1.0, float(ways - 1))


def spread(link: Link, devices: int, within: int, stride: int, ways: int) -> float:
    """Share of a device's bandwidth for an all-to-all over `ways` units of the level: what the cables between two
    halves of the group carry, at most all of it.

    Halves of m members along a side send each other a quarter of m members' bytes, half as much each way round where
    there is one (Dally and Towles, Principles and Practices of Interconnection Networks, 2004, chapter 3).
    """
    crossing = ways * ways / (4.0 * (ways - 1))  # of one member's bytes, what one half sends the other
    if link.topology == "tree":
        return min(1.0, 1.0 / crossing / max(1, stride // within))
    if link.topology == "full-mesh":
        return _meshed(link, devices, within, ways)
    if link.topology == "hybrid-cube":
        return _cube(_units(link, devices, within), stride, ways)[1]
    reached = 1.0
    for members, apart, closed in _spanned(link, devices, within, stride, ways):
        cables = (2.0 if closed else 1.0) / (2 * _DIMS[link.topology]) * (ways / members)
        reached = min(reached, cables / crossing / apart)
    return reached


def neighbour(link: Link, devices: int, within: int, stride: int) -> tuple[float, float]:
    """(share of a device's bandwidth, hops) of one message, which takes one cable, shared with those it passes."""
    if link.topology == "tree":
        apart = max(1, stride // within)
        return 1.0 / apart, _climbed(2, apart)
    if link.topology == "full-mesh":
        return 1.0 / max(1, _units(link, devices, within) - 1), 1.0
    if link.topology == "hybrid-cube":
        return _cabled(_units(link, devices, within), stride)
    if link.topology not in _DIMS:
        return 1.0, 1.0
    for side, apart in _along(link, devices, within, stride):
        if apart < side:
            return 1.0 / (2 * _DIMS[link.topology] * apart), float(apart)
    return 1.0 / (2 * _DIMS[link.topology]), 1.0


def _units(link: Link, devices: int, within: int) -> int:
    return max(1, min(link.size, devices) // within)


def _along(link: Link, devices: int, within: int, stride: int) -> list[tuple[int, int]]:
    """(side, how far apart members are along it), from the side that fills first."""
    left = max(1, stride // within)
    found = []
    for side in sides(_units(link, devices, within), _DIMS[link.topology]):
        found.append((side, min(left, side)))
        left = max(1, left // side)
    return found


def _spanned(link: Link, devices: int, within: int, stride: int, ways: int) -> list[tuple[int, int, bool]]:
    """(members, how far apart, whether there is a way round) along each side that the group spans; none of switches."""
    found, left = [], ways
    if link.topology not in _DIMS:
        return found
    for side, apart in _along(link, devices, within, stride):
        members = min(left, max(1, side // apart))
        if left > 1 and members > 1:
            found.append((members, apart, members * apart >= side and link.topology not in _OPEN))
            left = -(-left // members)
    return found


def _climbed(ways: int, apart: int) -> float:
    """Switches of a binary tree that a message round `ways` leaves passes, `apart` from each other: of two leaves h
    levels under a common switch 2 h - 1."""
    levels = log2(ways)
    return 3.0 * ways - 2.0 * levels - 3.0 + 2.0 * log2(apart) * (ways - 1)


def _meshed(link: Link, devices: int, within: int, ways: int) -> float:
    """Share of a unit's cables that lead to other members of its group."""
    return min(1.0, (ways - 1) / max(1, _units(link, devices, within) - 1))


def between(one: int, other: int) -> int:
    """Cables between two devices of a hybrid cube."""
    pair = frozenset((one, other))
    return 2 if pair in _TWICE else int(pair in _ALONE)


@lru_cache(maxsize=256)
def _cube(units: int, stride: int, ways: int) -> tuple[float, float, float]:
    """(share of a device's bandwidth for a ring, for an all-to-all, hops of one way round) of the worst of all groups
    of a hybrid cube. A ring takes as many cables as the member has that has fewest; halves talk over what is between
    them. A group in which some member has no cable goes through other devices."""
    units, ring, every, hops = min(units, CUBE), 1.0, 1.0, float(ways - 1)
    crossing = ways * ways / (4.0 * (ways - 1))
    span = stride * ways
    for start in range(0, max(1, units - span + 1), span):
        for first in range(start, start + stride):
            members = range(first, first + span, stride)
            fewest = min(sum(between(a, b) for b in members) for a in members)
            half = len(members) // 2
            across = sum(between(a, b) for a in members[:half] for b in members[half:])
            if not fewest or not across:
                return 0.5 / _CABLES, 0.5 / _CABLES / crossing, 2.0 * hops
            ring, every = (
                min(ring, fewest / _CABLES),
                min(every, fewest / _CABLES, across / _CABLES / crossing),
            )
    return ring, every, hops


@lru_cache(maxsize=64)
def _cabled(units: int, stride: int) -> tuple[float, float]:
    """(share of a device's bandwidth, hops) of a message between the worst of all pairs so far apart: where no cable
    connects them it goes through a device that both have one to."""
    pairs = [between(a, a + stride) for a in range(max(1, min(units, CUBE) - stride))]
    return max(1, min(pairs)) / _CABLES, 1.0 if min(pairs) else 2.0
