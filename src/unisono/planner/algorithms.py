"""Seconds of an all-reduce over the levels of a network: the quicker of ring and tree, as NCCL chooses.

Latency counts the messages that follow each other; bytes go over the slowest level's bus. Ring: Patarasuk and Yuan,
2009; tree: the two complementary binary trees of Sanders, Speck and Traeff, 2009, as in NCCL 2.4.
"""

from unisono.planner.collectives import bus, levels
from unisono.planner.machines.cluster import Cluster
from unisono.spec.numbers import smaller


def all_reduce(cluster: Cluster, stride: int, size: int, moved: float, share: float) -> float:
    """Seconds until `size` ranks, `stride` apart, have the sum of the `moved` bytes that each of them has. share: of
    the links' rate that the software reaches."""
    if size == 1:
        return 0.0
    net = bus(cluster, stride, size, share)
    # Every rank sends and receives all of it on the way up and on the way down.
    split = [(ways, latency / (ways - 1)) for ways, _, latency in levels(cluster, stride, size) if ways > 1]
    tree = 2.0 * (sum(latency * (ways - 1).bit_length() for ways, latency in split) + moved / net.rate)
    return smaller(net.all_reduce(moved), tree)
