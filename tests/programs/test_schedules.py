"""Bubbles and memory as the papers state them; what any timetable owes is in tests/conformance."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.costs import Costs, fitted, played, slowest
from tests.planner.forms import bubble_rate
from unisono.programs.check import check
from unisono.programs.pipeline import Action, Timetable, lower, peak_held
from unisono.programs.schedules import SCHEDULES
from unisono.programs.schedules.interleaved import Interleaved
from unisono.spec.errors import UsageError
from unisono_contrib.programs.schedules.dualpipe import DualPipe
from unisono_contrib.programs.schedules.dualpipev import DualPipeV
from unisono_contrib.programs.schedules.looped_bfs import LoopedBfs
from unisono_contrib.programs.schedules.zb1p import Zb1p
from unisono_contrib.programs.schedules.zb2p import Zb2p
from unisono_contrib.programs.schedules.zbv import ZbV
from unisono_contrib.programs.zero_bubble import handcrafted

RANKS, MICROS, CHUNKS = st.integers(1, 8), st.integers(1, 24), st.integers(1, 4)
COST = st.integers(1, 12)


def bubble_time(timetable: Timetable, costs: Costs, together: float | None = None) -> float:
    """Idle time of the slowest row, in times of a whole rank."""
    return slowest(played(timetable, costs, together)) - timetable.micros * costs.whole


@given(RANKS, st.integers(1, 4), CHUNKS, COST, COST)
@settings(deadline=None)
def test_interleaved(ranks: int, groups: int, v: int, forward: int, backward: int) -> None:
    table = Interleaved(v=v).timetable(ranks, ranks * groups)
    assert check(table) == []
    costs = Costs(forward * v, backward * v, 0)
    assert bubble_time(table, costs) == (ranks - 1) * (forward + backward)
    assert max(peak_held(table)) <= v * ranks * (1 + (ranks - 1) / (ranks * v)) + 1e-9
    if groups > 1:
        assert max(peak_held(table)) == (v + 1) * ranks - 1


def test_interleaved_has_two_stages_a_rank_if_not_told() -> None:
    assert Interleaved().timetable(4, 8) == SCHEDULES.read("interleaved:v=2").timetable(4, 8)
    assert SCHEDULES.read("looped_bfs:v=3").timetable(4, 8).stages == 12


@given(RANKS, st.integers(0, 16), CHUNKS, COST, COST)
@settings(deadline=None)
def test_looped_bfs(ranks: int, more: int, v: int, forward: int, backward: int) -> None:
    micros = ranks + more
    table = LoopedBfs(v=v).timetable(ranks, micros)
    assert check(table) == []
    assert bubble_time(table, Costs(forward * v, backward * v, 0)) == (ranks - 1) * (forward + backward)
    assert peak_held(table) == (v * micros,) * ranks


@given(RANKS, MICROS)
@settings(deadline=None)
def test_zero_bubble_memory(ranks: int, micros: int) -> None:
    for table, most in (
        (Zb1p().timetable(ranks, micros), ranks),
        (Zb2p().timetable(ranks, micros), 2 * ranks - 1),
        (ZbV().timetable(ranks, micros), 2 * ranks),  # of half a rank each
    ):
        assert check(table) == []
        assert max(peak_held(table)) <= min(most, micros * table.stages // ranks)


@given(RANKS, st.integers(0, 12), COST, COST, COST)
@settings(deadline=None)
def test_zero_bubble_in_the_memory_of_1f1b(ranks: int, more: int, f: int, b: int, w: int) -> None:
    # Weight gradients dearer than the bubble's parts do not fit into it: the formula is for those that do.
    micros, w = ranks + more, min(f, b, w)
    bubble = (ranks - 1) * (f + b - w)
    assert bubble_time(Zb1p().timetable(ranks, micros), Costs(f, b, w)) == bubble
    assert bubble_time(Zb1p().timetable(ranks, micros), Costs()) == ranks - 1


@given(RANKS, st.integers(0, 12), COST, COST, COST)
@settings(deadline=None)
def test_zero_bubble_in_twice_the_memory(ranks: int, more: int, f: int, b: int, w: int) -> None:
    micros, w = 2 * ranks - 1 + more, min(f, b, w)
    bubble = (ranks - 1) * (f + b - 2 * w)
    assert bubble_time(Zb2p().timetable(ranks, micros), Costs(f, b, w)) == bubble
    assert bubble_time(Zb2p().timetable(ranks, micros), Costs()) == 0


@given(RANKS, st.integers(0, 12), COST)
@settings(deadline=None)
def test_zbv_has_no_bubble(ranks: int, more: int, cost: int) -> None:
    table = ZbV().timetable(ranks, 2 * ranks - 1 + more)
    assert bubble_time(table, Costs(2 * cost, 2 * cost, 2 * cost)) == 0
    assert max(peak_held(table)) == 2 * ranks


@given(st.integers(1, 5), st.integers(0, 6), COST)
@settings(deadline=None)
def test_dualpipe(half: int, more: int, cost: int) -> None:
    ranks, micros = 2 * half, 4 * half + 2 * more
    table = DualPipe().timetable(ranks, micros)
    assert check(table) == []
    assert peak_held(table) == (ranks + 1,) * ranks
    pair, whole = 3 * cost, 2 * cost
    idle = bubble_time(table, Costs(cost, cost, cost), together=pair)
    assert idle == (ranks // 2 - 1) * (pair + whole - 3 * cost)
    assert list(table.micros_of(0)) + list(table.micros_of(ranks)) == list(range(micros))


@given(st.integers(1, 5), st.integers(0, 6), COST)
@settings(deadline=None)
def test_dualpipev_is_dualpipe_folded(ranks: int, more: int, cost: int) -> None:
    micros = 2 * ranks + more
    table = DualPipeV().timetable(ranks, micros)
    assert check(table) == []
    assert peak_held(table) == (2 * ranks + 1,) * ranks
    pair, whole = 3 * cost, 2 * cost
    idle = bubble_time(table, Costs(2 * cost, 2 * cost, 2 * cost), together=pair)
    assert idle == (ranks - 1) * (pair + whole - 3 * cost)


def test_the_first_pair_in_the_middle_is_not_overlapped() -> None:
    table = DualPipeV().timetable(4, 8)
    steady = [next(i for i, a in enumerate(row) if a.kind == "B") - 1 for row in table.rows]
    assert table.rows[3][steady[3]] not in table.overlapped
    pairs = [sum(a in table.overlapped for a in row) for row in table.rows]
    assert pairs == [2 * (8 - 8 + r + 1) + (3 - r) - (r == 3) for r in range(4)]


@given(RANKS, MICROS, st.sampled_from((1, 2)))
@settings(deadline=None)
def test_for_equal_costs_no_order_is_found_that_is_better_than_by_hand(
    ranks: int, micros: int, depth: int
) -> None:
    assert fitted(ranks, micros, depth, Costs()) == handcrafted(ranks, micros, depth)


def test_a_micro_batch_belongs_to_one_copy_of_the_model() -> None:
    good = DualPipe().timetable(2, 4)
    strange = replace(good, rows=((*good.rows[0], Action("F", 0, 3)), good.rows[1]))
    assert check(strange) == ["row 0 has F0.3, which does not exist"]
    assert "happens 0 times" in check(replace(good, chains=1, overlapped=frozenset()))[0]
    sent = [a for row in lower(good).rows for a in row if a.kind == "SEND_F"]
    assert {a.stage for a in sent} == {0, 2}  # nothing goes from stage 1 to stage 2


def test_an_overlapped_pair_that_is_quicker_than_its_parts_saves_its_time() -> None:
    table = DualPipe().timetable(4, 16)
    slow, fast = (slowest(played(table, Costs(), together=t)) for t in (3.0, 2.5))
    apart = slowest(played(table, Costs()))
    assert fast < apart <= slow


def test_an_overlapped_pair_begins_and_ends_together() -> None:
    table = DualPipe().timetable(2, 4)
    placed = played(table, Costs(2, 1, 1), together=3.0)
    at = {(p.action.kind, p.action.stage, p.action.micro): p for p in placed}
    for row in table.rows:
        for forward, backward, weight in zip(row, row[1:], row[2:], strict=False):
            if forward in table.overlapped:
                first, last = (
                    at[forward.kind, forward.stage, forward.micro],
                    at["W", weight.stage, weight.micro],
                )
                assert (weight.stage, weight.micro) == (backward.stage, backward.micro)
                assert last.stop - first.start == pytest.approx(3.0)


@pytest.mark.parametrize(
    "name, ranks, micros, fix",
    [
        ("interleaved", 4, 6, "micros=4 or micros=8"),
        ("interleaved", 4, 3, "micros=4,"),
        ("interleaved:v=0", 4, 8, "v (stages of each rank)"),
        ("dualpipe", 3, 8, "pp=4 micros=8"),
        ("dualpipe", 4, 7, "pp=4 micros=8"),
        ("dualpipev", 4, 7, "micros=8"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_can(name: str, ranks: int, micros: int, fix: str) -> None:
    with pytest.raises(UsageError) as refused:
        SCHEDULES.read(name).timetable(ranks, micros)
    assert fix in refused.value.fix


def test_bubble_rate_of_1f1b_is_the_closed_form() -> None:
    costs = Costs(2, 3, 1)
    assert math.isclose(bubble_rate(SCHEDULES.read("1f1b").timetable(4, 8), costs), 3 / 11)
