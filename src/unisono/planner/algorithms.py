"""Seconds of an all-reduce by algorithm, size and level of the network.

Latency counts the messages that follow each other; bytes go over each level's bus. Sources: ring and hierarchical:
Patarasuk and Yuan, 2009, and NCCL; halving_doubling: Rabenseifner, 2004, Thakur et al., 2005; tree: the two
complementary binary trees of Sanders, Speck and Traeff, 2009, as in NCCL 2.4; torus: rows, then columns, of Mikami et
al., 2018.
"""

from collections.abc import Iterator
from math import isqrt

from unisono.planner.collectives import bus
from unisono.planner.collectives import levels as reached
from unisono.planner.machines.cluster import Cluster
from unisono.spec.numbers import smaller

NAMES = ("auto", "ring", "tree", "halving_doubling", "hierarchical", "torus")


def all_reduce(cluster: Cluster, stride: int, size: int, moved: float, share: float, algorithm: str) -> float:
    """Seconds until `size` ranks, `stride` apart, have the sum of the `moved` bytes that each of them has.

    share: of the links' rate that the software reaches. auto, and what has no form here, takes the quicker
    of ring and tree, as NCCL does.
    """
    if size == 1:
        return 0.0
    if algorithm == "auto" or algorithm not in NAMES:
        ring, tree = (all_reduce(cluster, stride, size, moved, share, name) for name in ("ring", "tree"))
        return smaller(ring, tree)
    net = bus(cluster, stride, size, share)
    if algorithm == "ring":
        return net.all_reduce(moved)
    levels = list(_levels(cluster, stride, size, share))
    if algorithm == "tree":
        # Every rank sends and receives all of it on the way up and on the way down.
        return 2.0 * (sum(latency * _rounds(ways) for ways, _, latency in levels) + moved / net.rate)
    one_way, left = 0.0, moved
    for ways, rate, latency in levels:
        one_way += _level(algorithm, ways, rate, latency, left)
        left /= ways
    return 2.0 * one_way


def _levels(cluster: Cluster, stride: int, size: int, share: float) -> Iterator[tuple[int, float, float]]:
    """(ways, bytes/s of one member, seconds of a message) of each level that splits the group, the innermost first."""
    for ways, rate, latency in reached(cluster, stride, size):
        if ways > 1:
            yield ways, rate * share, latency / (ways - 1)


def _level(algorithm: str, ways: int, rate: float, latency: float, moved: float) -> float:
    """Seconds to scatter the sum of `moved` bytes over the members of one level, or to gather it."""
    if algorithm == "halving_doubling":
        one = latency * _rounds(ways) + (ways - 1) / ways * moved / rate
        # Members beyond a power of two hand over what they have first.
        return one if ways & (ways - 1) == 0 else one + latency + moved / rate
    if algorithm == "torus":
        x = max(d for d in range(1, isqrt(ways) + 1) if ways % d == 0)
        y = ways // x
        along = latency * (x - 1) + (x - 1) / x * moved / rate
        return along + latency * (y - 1) + (y - 1) / y * moved / x / rate
    return latency * (ways - 1) + (ways - 1) / ways * moved / rate  # hierarchical: a ring at each level


def _rounds(ways: int) -> int:
    return (ways - 1).bit_length()
