"""What a network without switches for every pair leaves of a device's bandwidth: groups that interleave share cables, a
line has no way back, and two halves of a group talk over the cables between them."""

from unisono.planner.machines.cluster import Link

_DIMS = {"ring": 1, "torus2d": 2, "torus3d": 3}


def sides(units: int, dims: int) -> tuple[int, ...]:
    """`units` as a product of `dims` numbers as near to each other as can be, the smallest first."""
    if dims == 1:
        return (units,)
    side = max(d for d in range(1, round(units ** (1.0 / dims) + 1e-9) + 1) if units % d == 0)
    return tuple(sorted((side, *sides(units // side, dims - 1))))


def group(link: Link, devices: int, within: int, stride: int, ways: int) -> tuple[float, float]:
    """(share of a device's bandwidth, hops of one way round) for a group's ring over `ways` units of the level.

    Along a side of a torus, members s units apart share each cable with the s - 1 groups between them; where they do
    not fill the side, the ring's way back takes the second direction. Sides that the group spans work at the same time.
    """
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
    reached = 1.0
    for members, apart, closed in _spanned(link, devices, within, stride, ways):
        cables = (2.0 if closed else 1.0) / (2 * _DIMS[link.topology]) * (ways / members)
        reached = min(reached, cables / crossing / apart)
    return reached


def neighbour(link: Link, devices: int, within: int, stride: int) -> tuple[float, float]:
    """(share of a device's bandwidth, hops) of one message, which takes one cable, shared with those it passes."""
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
            found.append((members, apart, members * apart >= side))
            left = -(-left // members)
    return found
