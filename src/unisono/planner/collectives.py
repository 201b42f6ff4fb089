"""Seconds of collectives over a cluster's levels: latency, and bytes over the bus (alpha and beta, level by level).

A group with g members in a node has g devices' share of the node's way out: eight members use all network cards of a
node of eight, one member uses one. The slowest level's bus carries the whole collective, as the pipelined rings of
NCCL do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from unisono.planner.machines.cluster import Cluster, Link
from unisono.planner.source import Source
from unisono.programs.collectives import Program
from unisono.programs.collectives import price as program_price
from unisono.programs.collectives.price import Hop, Topology
from unisono.spec.numbers import larger, smaller

_TOPOLOGIES = Source("specification", "sides along which a topology closes rings")
_DIMS: Annotated[dict[str, int], _TOPOLOGIES] = {"ring": 1, "torus2d": 2, "torus3d": 3}


def torus_sides(units: int, dims: int) -> tuple[int, ...]:
    """`units` as a product of `dims` numbers as near to each other as can be, the smallest first."""
    if dims == 1:
        return (units,)
    side = max(d for d in range(1, round(units ** (1.0 / dims) + 1e-9) + 1) if units % d == 0)
    return tuple(sorted((side, *torus_sides(units // side, dims - 1))))


def ring_share(link: Link, devices: int, within: int, stride: int, ways: int) -> tuple[float, float]:
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


def all_to_all_share(link: Link, devices: int, within: int, stride: int, ways: int) -> float:
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


def message_share(link: Link, devices: int, within: int, stride: int) -> tuple[float, float]:
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
    sides = []
    for side in torus_sides(_units(link, devices, within), _DIMS[link.topology]):
        sides.append((side, min(left, side)))
        left = max(1, left // side)
    return sides


def _spanned(link: Link, devices: int, within: int, stride: int, ways: int) -> list[tuple[int, int, bool]]:
    """(members, how far apart, whether there is a way round) along each side that the group spans; none of switches."""
    spans, left = [], ways
    if link.topology not in _DIMS:
        return spans
    for side, apart in _along(link, devices, within, stride):
        members = min(left, max(1, side // apart))
        if left > 1 and members > 1:
            spans.append((members, apart, members * apart >= side))
            left = -(-left // members)
    return spans


Programs = Callable[[str, int, int, int], Program]
"""Of an operation, ranks, a root and pieces."""
_LIMITS = Source(
    "specification", "how far programs are played for a price; larger groups are priced as rings"
)
_PLAYED: Annotated[int, _LIMITS] = 64
_PIECES: Annotated[int, _LIMITS] = 16


@dataclass(frozen=True, slots=True)
class Bus:
    """A group's network. size: members; rate: bytes/s of the bus; hops: seconds of latency of one way round."""

    size: int
    rate: float
    hops: float

    def all_reduce(self, moved: float) -> float:
        """Seconds to sum `moved` bytes that everyone has."""
        return self._ways(2.0, moved)

    def gather(self, moved: float) -> float:
        """Seconds of an all-gather to, or a reduce-scatter from, `moved` bytes in all."""
        return self._ways(1.0, moved)

    def sent(self, moved: float) -> float:
        """Bytes that one member sends for an all-reduce of `moved` bytes."""
        return 2.0 * (self.size - 1) / self.size * moved

    def _ways(self, ways: float, moved: float) -> float:
        if self.size == 1:
            return 0.0
        return ways * (self.hops + (self.size - 1) / self.size * moved / self.rate)


def bus(cluster: Cluster, stride: int, size: int, share: float = 1.0) -> Bus:
    """The bus of a group of `size` ranks, `stride` apart; share: of the links' rate that the software reaches."""
    rate, hops, inside = float("inf"), 0.0, 1
    for place, (ways, reached, latency) in enumerate(levels(cluster, stride, size)):
        if ways > 1:
            link, within = cluster.links[place], cluster.links[place - 1].size if place else 1
            here = reached * inside
            if link.topology == "rail-only" and within > 1 and stride % within and within % stride:
                # Members lie on different rails: their bytes go through the node first (Wang et al., 2023).
                here = 1.0 / (1.0 / here + 1.0 / cluster.links[place - 1].bus)
            rate, hops = min(rate, here), hops + latency
        inside *= ways
    return Bus(size, rate * share, hops)


def levels(cluster: Cluster, stride: int, size: int) -> tuple[tuple[int, float, float], ...]:
    """(ways that a group splits, bytes/s of one member that a ring over these reaches, seconds of latency of one way
    round) at each level, the innermost first."""
    splits, within = [], 1
    for link, ways in zip(cluster.links, cluster.levels(stride, size), strict=True):
        if ways == 1:
            splits.append((1, link.bus, 0.0))
        elif link.topology == "switched":
            splits.append((ways, link.bus_of(ways), link.latency * (ways - 1)))
        else:
            reached, steps = ring_share(link, cluster.devices, within, stride, ways)
            splits.append((ways, link.bus * reached, link.latency * steps))
        within = link.size
    return tuple(splits)


def all_reduce(
    cluster: Cluster, stride: int, size: int, moved: float, share: float, way: Programs | None = None
) -> float:
    """Seconds until `size` ranks, `stride` apart, have the sum of the `moved` bytes that each of them has: the quicker
    of a ring (Patarasuk and Yuan, 2009) and of two complementary trees (Sanders, Speck and Traeff, 2009), as NCCL
    chooses. share: of the links' rate that the software reaches. way: makes the program that is played instead; of more
    than 64 ranks nobody plays it through, and the price is the other's."""
    if size == 1:
        return 0.0
    if way is not None and size <= _PLAYED:
        program, links = way("all_reduce", size, 0, _PIECES), topology(cluster, stride, share)
        if isinstance(moved, int | float):
            return program_price.seconds(program, moved, links)
        import numpy as np

        return np.reshape(
            [program_price.seconds(program, nbytes, links) for nbytes in np.ravel(moved)], np.shape(moved)
        )  # type: ignore[return-value]
    net = bus(cluster, stride, size, share)
    # Every rank sends and receives all of it on the way up and on the way down.
    split = [(ways, latency / (ways - 1)) for ways, _, latency in levels(cluster, stride, size) if ways > 1]
    tree = 2.0 * (sum(latency * (ways - 1).bit_length() for ways, latency in split) + moved / net.rate)
    return smaller(net.all_reduce(moved), tree)


def topology(cluster: Cluster, stride: int, share: float = 1.0) -> Topology:
    """The way between any two ranks of a group whose ranks are `stride` apart: that of the innermost level which
    connects them, with what one device has of it."""

    def hop(source: int, to: int) -> Hop:
        for link in cluster.links:
            if source * stride // link.size == to * stride // link.size:
                break
        return Hop(link.latency, link.bandwidth / link.oversubscription * share)

    return hop


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all's network. reach: (ranks of one unit that this level connects, such units, bytes/s of one rank
    there), the innermost level first; hops: seconds of latency."""

    size: int = 1
    reach: tuple[tuple[int, int, float], ...] = ()
    hops: float = 0.0

    def all_to_all(self, moved: float) -> float:
        """Seconds until everyone has its part of the `moved` bytes that each rank holds. Levels work side by side."""
        return self.hops + max(
            (inside * (ways - 1) / self.size * moved / rate for inside, ways, rate in self.reach), default=0.0
        )

    def dispatch(self, moved: float, copies: float) -> float:
        """Return seconds of an all-to-all whose rows go to `copies` random ranks each. A row is sent to another unit
        once and forwarded inside it, as libraries for experts do over slow networks; or sent directly, if that is
        faster."""
        slowest = self.hops
        for inside, ways, rate in self.reach:
            share = (ways - 1) / ways
            if inside > 1:
                units = self.size / inside
                share = (
                    inside * (ways - 1) / self.size * units * (1.0 - (1.0 - 1.0 / units) ** copies) / copies
                )
            slowest = max(slowest, self.hops + share * moved / rate)
        return min(self.all_to_all(moved), slowest)

    def sent(self, moved: float) -> float:
        """Bytes that one member sends."""
        return (self.size - 1) / self.size * moved


ALONE = Exchange()


def exchange(cluster: Cluster, stride: int, size: int, share: float = 1.0) -> Exchange:
    """The network of an all-to-all of `size` ranks, `stride` apart; share: of the links' rate that software reaches.

    Other than a ring's, its bytes leave a node by the network card of each rank: (w - 1) / n of them at the innermost
    level of w ways, of n ranks in all.
    """
    if size == 1:
        return ALONE
    reach, inside, within, hops = [], 1, 1, 0.0
    for link, ways in zip(cluster.links, cluster.levels(stride, size), strict=True):
        if ways > 1:
            reached = all_to_all_share(link, cluster.devices, within, stride, ways)
            reach.append((inside, ways, link.bus * reached * share))
            hops = max(hops, link.latency)
        inside, within = inside * ways, link.size
    return Exchange(size, tuple(reach), hops)


def message(cluster: Cluster, stride: int, moved: float, share: float = 1.0, ranks: int = 2) -> float:
    """Seconds for `moved` bytes from a rank to the one `stride` further, where `ranks` of them form a line and every
    rank sends as much: the line goes at the pace of the outermost link that it crosses."""
    within = 1
    for place, link in enumerate(cluster.links):
        if stride * (ranks - 1) < link.size:
            reached, steps = message_share(link, cluster.devices, within, stride)
            seconds = steps * link.latency + moved / reached / (
                link.bandwidth / link.oversubscription * share
            )
            if link.topology == "rail-only" and within > 1 and stride % within:
                inner = cluster.links[place - 1]
                seconds += inner.latency + moved / (inner.bandwidth / inner.oversubscription * share)
            return seconds
        within = link.size
    return 0.0


def uncovered(seconds: float, cover: float, hidden: float) -> float:
    """Return the exposed part of `seconds` of communication beside `cover` seconds of computation, where software
    hides at most the share `hidden`. Numbers, or arrays."""
    return larger(seconds * (1.0 - hidden), seconds - cover)
