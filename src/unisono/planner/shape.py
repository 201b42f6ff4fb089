"""What a torus leaves of a device's bandwidth: groups that interleave share cables, and a line has no way back."""

from unisono.spec.cluster import Link

_DIMS = {"ring": 1, "torus2d": 2, "torus3d": 3}


def sides(units: int, dims: int) -> tuple[int, ...]:
    """`units` as a product of `dims` numbers as near to each other as can be, the smallest first."""
    if dims == 1:
        return (units,)
    side = max(d for d in range(1, round(units ** (1.0 / dims) + 1e-9) + 1) if units % d == 0)
    return tuple(sorted((side, *sides(units // side, dims - 1))))


def group(link: Link, devices: int, within: int, stride: int, ways: int) -> tuple[float, float]:
    """(share of a device's bandwidth, hops of one way round) for a group's ring over `ways` units of the level.

    Along a side, members s units apart share each cable with the s - 1 groups between them; where they do not fill
    the side, the ring's way back takes the second direction. Sides that the group spans work at the same time.
    """
    if link.topology not in _DIMS:
        return 1.0, float(ways - 1)
    reached, hops, left = 0.0, 0.0, ways
    for side, apart in _along(link, devices, within, stride):
        if left == 1:
            break
        members = min(left, max(1, side // apart))
        if members > 1:
            closed = members * apart >= side or members == 2
            reached += (1.0 if closed else 0.5) / apart / _DIMS[link.topology]
            hops += (members - 1) * apart
            left = -(-left // members)
    return (reached, hops) if reached else (1.0, float(ways - 1))


def neighbour(link: Link, devices: int, within: int, stride: int) -> tuple[float, float]:
    """(share of a device's bandwidth, hops) of one message, which takes one cable, shared with those it passes."""
    if link.topology not in _DIMS:
        return 1.0, 1.0
    for side, apart in _along(link, devices, within, stride):
        if apart < side:
            return 1.0 / (2 * _DIMS[link.topology] * apart), float(apart)
    return 1.0 / (2 * _DIMS[link.topology]), 1.0


def _along(link: Link, devices: int, within: int, stride: int) -> list[tuple[int, int]]:
    """(side, how far apart members are along it), from the side that fills first."""
    units = max(1, min(link.size, devices) // within)
    left = max(1, stride // within)
    found = []
    for side in sides(units, _DIMS[link.topology]):
        found.append((side, min(left, side)))
        left = max(1, left // side)
    return found
