"""All-reduce: the quicker of ring and tree, never quicker than its bytes."""

from itertools import product

from unisono.planner.clusters import cluster
from unisono.planner.collectives import all_reduce, bus, exchange

KB, GB = 1e3, 1e9


def seconds(size: int, moved: float, stride: int = 1) -> float:
    return all_reduce(cluster("dgx-a100:64"), stride, size, moved, 0.8)


def test_more_bytes_and_more_ranks_take_longer() -> None:
    assert seconds(1, GB) == 0.0
    for size, moved in product((2, 8, 64, 512), (KB, GB)):
        assert seconds(size, 2 * moved) > seconds(size, moved) > 0.0
    assert seconds(16, GB, 8) > seconds(4, GB, 8)


def test_nothing_beats_the_bound_and_nothing_is_slower_than_a_ring() -> None:
    """Each rank has to send and receive (n-1)/n of it twice (Patarasuk and Yuan, 2009)."""
    where = cluster("dgx-a100:64")
    for size in (8, 64):
        fastest = max(link.bus for link in where.links) * 0.8
        ring = bus(where, 1, size, 0.8).all_reduce(GB)
        assert 2 * (size - 1) / size * GB / fastest <= seconds(size, GB) <= ring
    assert seconds(8, 10 * GB) == bus(where, 1, 8, 0.8).all_reduce(10 * GB)


def test_small_messages_over_many_ranks_take_a_tree() -> None:
    assert seconds(64, KB, 8) < bus(cluster("dgx-a100:64"), 8, 64, 0.8).all_reduce(KB)


def test_heads_that_change_ranks_leave_a_node_by_each_ranks_own_card() -> None:
    where = cluster("dgx-a100:4")
    inside, across = exchange(where, 1, 8), exchange(where, 1, 32)
    assert inside.all_to_all(GB) < across.all_to_all(GB)
    assert across.all_to_all(GB) >= 24 / 32 * GB / 25e9
    assert exchange(where, 1, 1).all_to_all(GB) == 0.0
    assert bus(where, 1, 8).size == 8
