"""A rank dies inside an operation: each of the others raises PeerGone, which names it, and nothing is left behind."""

import pytest

from tests.comm.dying import LARGE, MOMENTS, OPS, SMALL, algorithms, faults
from tests.ranks import World

pytestmark = pytest.mark.timeout(300)
NAMES = list(OPS)


def some(ctx, cells):
    """In a process from which ranks can be forked. cells: algorithm, operation, moment, elements."""
    found = {" ".join(map(str, cell)): faults(*cell) for cell in cells}
    return {cell: said for cell, said in found.items() if said}


def test_survivors_name_the_dead(world: World) -> None:
    """Every algorithm and every operation once; the whole grid is below."""
    cells = [
        (name, NAMES[i % len(NAMES)], i // 2 % len(MOMENTS), SMALL) for i, name in enumerate(algorithms())
    ]
    cells += [
        ("memory", "reduce_scatter", 1, LARGE),
        ("auto on two hosts", "all_reduce later", 0, LARGE),
        ("auto on two hosts", "all_reduce later", 1, LARGE),
        ("auto on two hosts", "all_reduce", 1, LARGE),
        ("hierarchical on two hosts", "reduce_scatter", 1, LARGE),
        ("memory", "reduce_scatter, lent", 0, LARGE),
        ("auto", "all_gather, lent", 0, LARGE),
        ("auto", "send and receive", 0, LARGE),
        ("auto", "through memory", 0, LARGE),
    ]
    assert {cell[1] for cell in cells} == set(NAMES)
    assert world(some, 1, group=False, cells=cells, timeout=280) == [{}]


@pytest.mark.slow
@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("algorithm", algorithms())
def test_in_every_operation_of_every_algorithm(world: World, algorithm: str, op: str) -> None:
    cells = [(algorithm, op, moment, numel) for moment in MOMENTS.values() for numel in (SMALL, LARGE)]
    assert world(some, 1, group=False, cells=cells, timeout=280) == [{}]
