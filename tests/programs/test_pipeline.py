import itertools
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from unisono.programs.check import check
from unisono.programs.pipeline import (
    Action,
    Timetable,
    arrives_as,
    bubble,
    lower,
    peak_held,
    play_costs,
)
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError

RANKS, MICROS = st.integers(1, 8), st.integers(1, 16)


@given(RANKS, MICROS, st.sampled_from(["gpipe", "1f1b"]))
def test_bubble_of_the_flush_schedules_is_the_papers(ranks: int, micros: int, name: str) -> None:
    placed = play_costs(SCHEDULES.read(name).timetable(ranks, micros), forward=1.0, backward=1.0)
    assert bubble(placed) == pytest.approx((ranks - 1) / (micros + ranks - 1))


@given(RANKS, MICROS)
def test_backwards_twice_as_dear_leave_the_bubble_as_it_is(ranks: int, micros: int) -> None:
    placed = play_costs(SCHEDULES.read("1f1b").timetable(ranks, micros), forward=1.0, backward=2.0)
    assert bubble(placed) == pytest.approx((ranks - 1) / (micros + ranks - 1))


@given(RANKS, MICROS)
def test_accumulate_computes_on_one_rank_at_a_time(ranks: int, micros: int) -> None:
    placed = play_costs(SCHEDULES.read("accumulate").timetable(ranks, micros))
    assert bubble(placed) == pytest.approx((ranks - 1) / ranks)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(placed))


@given(RANKS, MICROS)
def test_activations_held(ranks: int, micros: int) -> None:
    assert peak_held(SCHEDULES.read("accumulate").timetable(ranks, micros)) == (1,) * ranks
    assert peak_held(SCHEDULES.read("gpipe").timetable(ranks, micros)) == (micros,) * ranks
    expected = tuple(min(micros, ranks - stage) for stage in range(ranks))
    assert peak_held(SCHEDULES.read("1f1b").timetable(ranks, micros)) == expected


@given(RANKS, MICROS, st.floats(0, 3), st.floats(0.1, 3), st.floats(0.1, 3))
def test_time_never_runs_backwards(
    ranks: int, micros: int, send: float, forward: float, backward: float
) -> None:
    placed = play_costs(SCHEDULES.read("1f1b").timetable(ranks, micros), forward, backward, send)
    stop = {(p.action.kind, p.action.stage, p.action.micro): p.stop for p in placed}
    for p in placed:
        if p.action.kind == "F" and p.action.stage > 0:
            assert p.start >= stop["F", p.action.stage - 1, p.action.micro] + send
    for row in range(ranks):
        mine = [p for p in placed if p.row == row]
        assert all(a.stop <= b.start for a, b in itertools.pairwise(mine))


def test_a_slow_stage_sets_the_pace() -> None:
    placed = play_costs(SCHEDULES.read("1f1b").timetable(2, 4), forward=[1.0, 3.0], backward=[1.0, 3.0])
    assert max(p.stop for p in placed) == 1 + 4 * 6 + 1


def test_check_names_what_is_missing_twice_or_out_of_order() -> None:
    good = SCHEDULES.read("gpipe").timetable(2, 2)
    first, second = good.rows
    assert check(replace(good, rows=(first[:-1], second))) == ["B0.1 happens 0 times"]
    assert check(replace(good, rows=((*first, Action("F", 0, 0)), second))) == ["F0.0 happens 2 times"]
    assert "owns the stage" in check(replace(good, rows=((*first, Action("F", 1, 0)), second)))[0]
    turned = (first[2], first[0], first[1], first[3])
    assert "row 0 has B0.0 before F0.0" in check(replace(good, rows=(turned, second)))
    assert check(replace(good, placement=(0, 7))) == ["placement (0, 7) names rows that do not exist"]


def test_check_finds_rows_that_wait_for_each_other() -> None:
    # Each row wants a backward of the other before it makes the forward the other needs.
    rows = (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)),
    )
    stuck = Timetable(rows, placement=(0, 1), micros=2)
    assert check(stuck) == ["row 0 waits for ever at RECV_B0.0", "row 1 waits for ever at RECV_F1.1"]
    with pytest.raises(ValueError, match="deadlocks"):
        play_costs(stuck)


def interleaved(micros: int) -> Timetable:
    """Two rows, four stages, all forwards and then all backwards; stage s on row s % 2."""
    rows = tuple(
        tuple(Action("F", stage, m) for stage in (row, row + 2) for m in range(micros))
        + tuple(Action("B", stage, m) for stage in (row + 2, row) for m in range(micros))
        for row in (0, 1)
    )
    return Timetable(rows, placement=(0, 1, 0, 1), micros=micros)


@given(MICROS)
def test_several_stages_per_row(micros: int) -> None:
    timetable = interleaved(micros)
    assert check(timetable) == []
    assert timetable.owned(1) == (1, 3)
    assert peak_held(timetable) == (2 * micros, 2 * micros)


def test_neighbouring_stages_on_one_row_need_no_message() -> None:
    row = tuple(Action("F", s, 0) for s in range(3)) + tuple(Action("B", s, 0) for s in (2, 1, 0))
    assert lower(Timetable((row,), placement=(0, 0, 0), micros=1)).rows == (row,)


@given(RANKS, MICROS, st.sampled_from(SCHEDULES.names()))
@settings(deadline=None)
def test_messages_between_two_rows_keep_their_order(ranks: int, micros: int, name: str) -> None:
    try:
        lowered = lower(SCHEDULES.read(name).timetable(ranks, micros))
    except UsageError:
        reject()
    for a in range(ranks):
        for b in range(ranks):
            sent = [arrives_as(x, a) for x in lowered.rows[a] if x.kind.startswith("SEND") and x.peer == b]
            received = [x for x in lowered.rows[b] if x.kind.startswith("RECV") and x.peer == a]
            assert sent == received


def test_a_receive_moves_forward_when_an_earlier_message_is_in_its_way() -> None:
    # Row 1 wants micro-batch 1 first although row 0 sends 0 first.
    rows = (
        (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)),
        (Action("F", 1, 1), Action("F", 1, 0), Action("B", 1, 0), Action("B", 1, 1)),
    )
    timetable = Timetable(rows, placement=(0, 1), micros=2)
    assert [str(a) for a in lower(timetable).rows[1][:3]] == ["RECV_F1.0", "RECV_F1.1", "F1.1"]
    assert check(timetable) == []


def test_lowering_twice_is_lowering_once() -> None:
    once = lower(SCHEDULES.read("1f1b").timetable(4, 8))
    assert lower(once) is once


def test_weight_gradients_apart() -> None:
    rows = (
        (*(Action("F", 0, m) for m in range(2)), *(Action(k, 0, m) for k in ("B", "W") for m in range(2))),
    )
    timetable = Timetable(rows, placement=(0,), micros=2)
    assert check(timetable) == []
    assert peak_held(timetable) == (2,)
    assert max(p.stop for p in play_costs(timetable, 1, 1, weight=0.5)) == 5.0
    assert check(replace(timetable, rows=(rows[0][:-1],))) == ["W0.1 happens 0 times"]
