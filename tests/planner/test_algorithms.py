"""All-reduce by algorithm: what each is good for, and what all have in common."""

from itertools import product

import pytest

from unisono.plan.grammar import known
from unisono.planner.algorithms import NAMES, all_reduce
from unisono.planner.clusters import cluster
from unisono.planner.collectives import bus, exchange

KB, GB = 1e3, 1e9


def seconds(name: str, size: int, moved: float, stride: int = 1) -> float:
    return all_reduce(cluster("dgx-a100:64"), stride, size, moved, 0.8, name)


@pytest.mark.parametrize("name", NAMES)
def test_more_bytes_and_more_ranks_take_longer(name: str) -> None:
    assert seconds(name, 1, GB) == 0.0
    for size, moved in product((2, 8, 64, 512), (KB, GB)):
        assert seconds(name, size, 2 * moved) > seconds(name, size, moved) > 0.0
    assert seconds(name, 16, GB, 8) > seconds(name, 4, GB, 8)


@pytest.mark.parametrize("name", NAMES)
def test_no_algorithm_beats_the_bound(name: str) -> None:
    """Each rank has to send and receive (n-1)/n of it twice (Patarasuk and Yuan, 2009)."""
    where = cluster("dgx-a100:64")
    for size in (8, 64):
        fastest = max(link.bus for link in where.links) * 0.8
        assert seconds(name, size, GB) >= 2 * (size - 1) / size * GB / fastest


def test_the_tree_is_for_small_messages_and_many_ranks_and_the_ring_for_large_ones() -> None:
    assert seconds("tree", 64, KB, 8) < seconds("ring", 64, KB, 8)
    assert seconds("ring", 8, 10 * GB) < seconds("tree", 8, 10 * GB)
    assert (
        seconds("halving_doubling", 64, KB, 8)
        < seconds("torus", 64, KB, 8)
        < seconds("hierarchical", 64, KB, 8)
    )


def test_auto_is_the_better_of_ring_and_tree() -> None:
    for size, moved in product((2, 16, 256), (KB, 1e6, GB)):
        assert seconds("auto", size, moved) == min(seconds("ring", size, moved), seconds("tree", size, moved))
        assert seconds("engine", size, moved) == seconds("auto", size, moved)
    assert set(NAMES) | {"engine", "messages", "memory"} == set(known("collective"))


def test_inside_one_level_a_hierarchy_is_a_ring() -> None:
    assert seconds("hierarchical", 8, GB) == pytest.approx(seconds("ring", 8, GB))
    # A power of two more or less: the others hand over first.
    assert seconds("halving_doubling", 6, GB) > seconds("halving_doubling", 8, GB)


def test_heads_that_change_ranks_leave_a_node_by_each_ranks_own_card() -> None:
    where = cluster("dgx-a100:4")
    inside, across = exchange(where, 1, 8), exchange(where, 1, 32)
    assert inside.all_to_all(GB) < across.all_to_all(GB)
    assert across.all_to_all(GB) >= 24 / 32 * GB / 25e9
    assert exchange(where, 1, 1).all_to_all(GB) == 0.0
    assert bus(where, 1, 8).size == 8
