"""Collectives as programs: whole for any number of ranks, as few rounds and bytes as theory says, priced and drawn."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import ceil, log2
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.programs.collectives import (
    OPS,
    ROOTED,
    Move,
    Program,
    backwards,
    direct,
    draw,
    hierarchical,
    price,
    ring,
    row,
    tree,
)
from unisono.programs.collectives.check import check
from unisono_contrib.programs.collectives import double_tree, halving_doubling, torus

ALGORITHMS = (direct, ring, tree, double_tree, halving_doubling, torus, hierarchical)
SIZES = (*range(1, 10), 16)
UNEVEN = ([[0, 1, 2], [3, 4]], [[0, 2, 4], [1, 3, 5]], [[0], [1], [2]], [[0, 1], [2, 3], [4, 5, 6]])


def digits(n: int) -> int:
    return ceil(log2(n)) if n > 1 else 0


def folded(n: int) -> tuple[int, int]:
    """(the largest power of two in n, 1 where ranks are left over)."""
    power = 1 << (n.bit_length() - 1)
    return power, int(n != power)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_operation_of_any_ranks_is_whole(algorithm: ModuleType) -> None:
    for op, n, pieces in product(OPS, SIZES, (1, 3)):
        for root in {0, n // 2, n - 1} if op in ROOTED else {0}:
            assert check(algorithm.program(op, n, root, pieces)) == [], (op, n, root, pieces)


@pytest.mark.parametrize("nodes", UNEVEN, ids=str)
def test_nodes_of_any_size_and_order_are_whole(nodes: list[list[int]]) -> None:
    n = sum(map(len, nodes))
    for op in OPS:
        for root in range(n) if op in ROOTED else [0]:
            assert check(hierarchical.program(op, n, root, 1, nodes)) == []


# (algorithm, operation): rounds, and the share of the whole vector that the busiest rank sends; by the papers named in
# the algorithms' files.
Theory = Callable[[int], float]
THEORY: dict[tuple[ModuleType, str], tuple[Theory, Theory]] = {
    (ring, "reduce_scatter"): (lambda n: n - 1, lambda n: (n - 1) / n),
    (ring, "all_gather"): (lambda n: n - 1, lambda n: (n - 1) / n),
    (ring, "all_reduce"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    (ring, "all_to_all"): (lambda n: n - 1, lambda n: (n - 1) / n),
    (ring, "broadcast"): (lambda n: n - 1, lambda n: n > 1),
    (ring, "reduce"): (lambda n: n - 1, lambda n: n > 1),
    (ring, "gather"): (lambda n: n - 1, lambda n: (n - 1) / n),
    (ring, "scatter"): (lambda n: n - 1, lambda n: (n - 1) / n),
    (tree, "broadcast"): (digits, digits),
    (tree, "reduce"): (digits, lambda n: n > 1),
    (tree, "all_reduce"): (lambda n: 2 * digits(n), digits),
    (tree, "scatter"): (digits, lambda n: (n - 1) / n),
    (tree, "all_to_all"): (digits, lambda n: sum(way.bit_count() for way in range(n)) / n),
    (direct, "reduce_scatter"): (lambda n: n > 1, lambda n: (n - 1) / n),
    (direct, "all_gather"): (lambda n: n > 1, lambda n: (n - 1) / n),
    (direct, "all_reduce"): (lambda n: 2 * (n > 1), lambda n: 2 * (n - 1) / n),
    (direct, "all_to_all"): (lambda n: n > 1, lambda n: (n - 1) / n),
    (direct, "broadcast"): (lambda n: n > 1, lambda n: n - 1),
    (direct, "scatter"): (lambda n: n > 1, lambda n: (n - 1) / n),
    (direct, "gather"): (lambda n: n > 1, lambda n: (n > 1) / n),
    (direct, "reduce"): (lambda n: n > 1, lambda n: n > 1),
}


@pytest.mark.parametrize(
    ("algorithm", "op"), THEORY, ids=lambda x: x if isinstance(x, str) else x.__name__.rpartition(".")[2]
)
def test_rounds_and_bytes_are_those_of_theory(algorithm: ModuleType, op: str) -> None:
    rounds, share = THEORY[algorithm, op]
    for n in SIZES:
        program, numel = algorithm.program(op, n), 5040 * 16
        assert len(program.rounds) == rounds(n)
        assert program.most(numel) == round(share(n) * numel)


def test_a_branch_of_the_tree_sends_its_blocks_once() -> None:
    for n in SIZES:
        program = tree.program("gather", n)
        assert len(program.rounds) == digits(n)
        for rank in range(1, n):
            branch = min(rank & -rank, n - rank)
            assert program.sent(rank, 720 * n) == 720 * branch


def test_halving_and_doubling_take_few_rounds_and_few_bytes() -> None:
    for n in SIZES:
        power, left = folded(n)
        both, scatter = (halving_doubling.program(op, n) for op in ("all_reduce", "reduce_scatter"))
        assert len(both.rounds) == 2 * digits(power) + 2 * left
        assert len(scatter.rounds) == digits(power) + 2 * left
        if not left:
            assert both.most(720 * n) == 2 * 720 * (n - 1)
        else:  # who took in a neighbour sends it everything at last; others no more than three times theirs
            assert both.most(720 * n) <= (2 + 1) * 720 * n


def test_a_torus_takes_the_rounds_of_its_sides_and_the_bytes_of_a_ring() -> None:
    for n in SIZES:
        rows = torus.nearest(n)
        columns = n // rows
        for op, times in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
            program = torus.program(op, n)
            assert len(program.rounds) == times * (rows - 1 + columns - 1)
            assert program.most(720 * n) == times * 720 * (n - 1)
    assert torus.nearest(12) == 3 and torus.nearest(7) == 1
    with pytest.raises(ValueError, match="7 ranks are no grid of 2 rows"):
        torus.program("all_reduce", 7, rows=2)


@pytest.mark.parametrize(("width", "count"), [(2, 2), (2, 4), (3, 3), (4, 4)])
def test_between_nodes_goes_what_one_rank_adds_up(width: int, count: int) -> None:
    nodes = [list(range(i * width, (i + 1) * width)) for i in range(count)]
    n, numel = width * count, 720 * width * count
    program = hierarchical.program("all_reduce", n, nodes=nodes)
    far = [m for turn in program.rounds for m in turn if m.source // width != m.to // width and m.source == 0]
    assert sum(len(m.chunks) for m in far) * numel / n == 2 * (count - 1) / count * numel / width
    assert len(program.rounds) == 2 + 2 * (count - 1)
    whole = hierarchical.program("broadcast", n, 1, nodes=nodes)
    assert sum(m.source // width != m.to // width for turn in whole.rounds for m in turn) == count - 1


def test_two_trees_load_ranks_alike_and_take_few_rounds() -> None:
    for n in SIZES[1:]:
        for pieces in (1, 4, 16):
            program = double_tree.program("all_reduce", n, 0, pieces)
            numel = 2 * pieces * 12
            assert program.most(numel) <= 2 * numel
            assert sum(program.sent(rank, numel) for rank in range(n)) == 2 * (n - 1) * numel
            assert len(program.rounds) <= 4 * pieces + 4 * digits(n) + 8
            for moves in program.rounds:
                assert len({m.source for m in moves}) == len({m.to for m in moves}) == len(moves)


def test_nobody_can_send_less() -> None:
    """Of all ranks together: each contribution has to leave, or to arrive."""
    for algorithm, n in product(ALGORITHMS, SIZES):
        numel = 720 * n
        least = {"all_reduce": 2 * (n - 1) * numel, "all_gather": (n - 1) * numel}
        for op, bound in {**least, "reduce_scatter": (n - 1) * numel, "all_to_all": (n - 1) * numel}.items():
            sent = sum(algorithm.program(op, n).sent(rank, numel) for rank in range(n))
            assert sent >= bound


@given(st.sampled_from(ALGORITHMS), st.sampled_from(OPS), st.integers(1, 9), st.integers(0, 50), st.data())
def test_both_ends_of_every_message_agree(
    algorithm: ModuleType, op: str, n: int, part: int, data: st.DataObject
) -> None:
    """Rank by rank, in order, with messages cut: what one sends another receives."""
    longest, numel = data.draw(st.integers(0, 7)), part * n
    program = algorithm.program(op, n)
    rows = [row(program, rank, numel, longest) for rank in range(n)]
    for a, b in product(range(n), range(n)):
        sent = [m.runs for turn in rows[a] for m in turn.sends if m.peer == b]
        come = [m.runs for turn in rows[b] for m in turn.receives if m.peer == a]
        assert sent == come
    for rank in range(n):
        total = sum(m.numel for turn in rows[rank] for m in turn.sends)
        assert total == program.sent(rank, numel)


def with_round(number: int, moves: tuple[Move, ...]) -> Program:
    whole = ring.program("all_reduce", 4)
    return replace(whole, rounds=(*whole.rounds[:number], moves, *whole.rounds[number + 1 :]))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (with_round(0, ()), "at the end rank 1 has of chunk 1 the part of ranks 0, 1, 3"),
        (with_round(5, ()), "at the end rank 0 has of chunk"),
        (with_round(0, (Move(0, 0, (0,)),)), "a move from rank 0 to rank 0"),
        (with_round(0, (Move(0, 7, (0,)),)), "a move from rank 0 to rank 7"),
        (with_round(0, (Move(0, 1, (9,)),)), "a move of chunks (9,) of 4"),
        (with_round(0, (Move(0, 1, (0,)), Move(2, 1, (0,)))), "rank 1 overwrites chunk 0 while it is in use"),
        (with_round(0, (Move(0, 1, (0,)), Move(1, 0, (0,)))), "overwrites chunk 0 while it is in use"),
        (
            Program("reduce", 3, 1, ((Move(1, 0, (0,), True),), (Move(1, 0, (0,), True),))),
            "rank 0 adds the part of ranks 1 to chunk 0 twice",
        ),
        (Program("gather", 2, 2, ((Move(1, 0, (0,)),),)), "rank 1 sends chunk 0, which it does not have"),
        (Program("gather", 2, 2, ((Move(1, 0, (1,), True),),)), "of which it has nothing"),
        (Program("gather", 2, 3, ()), "3 chunks are no equal blocks of 2"),
        (Program("shout", 2, 2, ()), "shout is no collective"),
    ],
)
def test_what_is_wrong_is_found(program: Program, words: str) -> None:
    assert any(words in fault for fault in check(program))


def test_any_lost_move_is_found() -> None:
    for algorithm in ALGORITHMS:
        whole = algorithm.program("all_reduce", 5)
        for number, moves in enumerate(whole.rounds):
            for lost in range(len(moves)):
                less = moves[:lost] + moves[lost + 1 :]
                rounds = (*whole.rounds[:number], less, *whole.rounds[number + 1 :])
                assert check(replace(whole, rounds=rounds)), (algorithm.__name__, number, lost)


def test_a_reduce_backwards_is_a_broadcast() -> None:
    for algorithm in (tree, halving_doubling, direct):
        rounds = algorithm.program("reduce", 6).rounds
        assert check(Program("broadcast", 6, 6, backwards(rounds))) == []


LATENCY, RATE = 1e-4, 1e9


def seconds(algorithm: ModuleType, n: int, nbytes: float, pieces: int = 1) -> float:
    return price.seconds(algorithm.program("all_reduce", n, 0, pieces), nbytes, price.alike(LATENCY, RATE))


def test_prices_are_the_formulas_of_latency_and_rate() -> None:
    for n, nbytes in product((2, 3, 4, 8, 16), (1e3, 1e6, 1e9)):
        ring_time = 2 * (n - 1) * (LATENCY + nbytes / n / RATE)
        assert seconds(ring, n, nbytes) == pytest.approx(ring_time)
        assert seconds(tree, n, nbytes) == pytest.approx(2 * digits(n) * (LATENCY + nbytes / RATE))
        assert seconds(direct, n, nbytes) == pytest.approx(2 * (LATENCY + (n - 1) * nbytes / n / RATE))
        if n == 1 << digits(n):
            few = 2 * digits(n) * LATENCY + 2 * (n - 1) / n * nbytes / RATE
            assert seconds(halving_doubling, n, nbytes) == pytest.approx(few)


def test_small_vectors_want_few_rounds_and_large_ones_few_bytes() -> None:
    assert seconds(tree, 9, 1e3) < seconds(ring, 9, 1e3)
    assert seconds(ring, 9, 1e9) < seconds(tree, 9, 1e9)
    assert seconds(double_tree, 16, 1e7, 16) < seconds(tree, 16, 1e7)


def test_slow_links_between_nodes_want_levels() -> None:
    def topology(source: int, to: int) -> price.Hop:
        return price.Hop(1e-5, 1e11) if source // 4 == to // 4 else price.Hop(1e-4, 1e9)

    nodes = [list(range(i, i + 4)) for i in range(0, 16, 4)]
    levels = hierarchical.program("all_reduce", 16, nodes=nodes)
    for other in (ring, tree, direct, halving_doubling):
        assert price.seconds(levels, 1e8, topology) < price.seconds(
            other.program("all_reduce", 16), 1e8, topology
        )


def test_a_message_waits_for_both_ranks_and_for_the_way() -> None:
    moves = (Move(1, 0, (0,), True), Move(2, 0, (0,), True))
    first, second = price.play(Program("reduce", 3, 1, (moves,)), 1e6, price.alike(LATENCY, RATE))
    assert (first.start, second.start) == (0.0, pytest.approx(1e-3))
    assert second.stop == pytest.approx(2e-3 + LATENCY)


def test_text_shows_every_move_once() -> None:
    program = halving_doubling.program("all_reduce", 3)
    assert draw.text(program) == (
        "        round 0  round 1  round 2  round 3\n"
        "rank 0  .        +2>2     =0-1>2   =0-2>1\n"
        "rank 1  +0-2>0   .        .        .\n"
        "rank 2  .        +0-1>0   =2>0     ."
    )


def test_the_picture_is_xml_with_an_arrow_for_each_move() -> None:
    program = ring.program("all_reduce", 4)
    picture = ElementTree.fromstring(draw.svg(program))
    name = "{http://www.w3.org/2000/svg}line"
    arrows = [line for line in picture.iter(name) if "marker-end" in line.attrib]
    assert len(arrows) == sum(map(len, program.rounds))
    assert "all_reduce of 4 ranks, 6 rounds" in ElementTree.tostring(picture, encoding="unicode")
