"""Timetables on shared cores: with a core each as without sharing, and never faster than the work allows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.programs.pipeline import Placed, play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.programs.shared import SharedCosts, play_shared

NAMES = ("gpipe", "1f1b")


def costs_of(forward, backward, ranks, wire=0.0, latency=0.0, wait=0.0):
    return SharedCosts(
        [(forward, wait)] * ranks, [(backward, wait)] * ranks, [wire] * ranks, [latency] * ranks
    )


def span(placed: list[Placed]) -> float:
    return max(p.stop for p in placed)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 8), st.floats(0.1, 3), st.floats(0.1, 3),
    st.floats(0, 0.5),
)  # fmt: skip
def test_with_a_core_for_every_rank_it_is_the_plain_event_simulation(name, ranks, micros, f, b, latency):
    timetable = SCHEDULES.read(name).timetable(ranks, micros)
    shared = play_shared(timetable, costs_of(f, b, ranks, latency=latency))
    plain = play_costs(timetable, f, b, latency)
    assert {(p.row, p.action): (p.start, p.stop) for p in shared} == {
        (p.row, p.action): (pytest.approx(p.start), pytest.approx(p.stop)) for p in plain
    }


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 8), st.integers(1, 3), st.integers(1, 4))
def test_cores_bound_the_span_from_below_and_one_after_the_other_from_above(name, ranks, micros, each, cores):
    timetable = SCHEDULES.read(name).timetable(ranks, micros)
    placed = play_shared(timetable, costs_of(1.0, 2.0, ranks), each, lambda active: max(1.0, active / cores))
    work = 3.0 * micros * ranks * each
    assert work / cores - 1e-9 <= span(placed) <= work + 1e-9
    assert span(placed) >= span(play_costs(timetable, 1.0, 2.0)) - 1e-9


def test_on_one_core_a_bubble_costs_nothing():
    timetable = SCHEDULES.read("1f1b").timetable(4, 8)
    placed = play_shared(timetable, costs_of(1.0, 2.0, 4), 1, lambda active: active)
    assert span(placed) == pytest.approx(3.0 * 8 * 4)


def test_messages_queue_on_a_wire_that_is_slower_than_the_work():
    timetable = SCHEDULES.read("gpipe").timetable(2, 10)
    placed = play_shared(timetable, costs_of(0.1, 0.1, 2, wire=1.0))
    last = max(p.start for p in placed if p.row == 1 and p.action.kind == "F")
    assert last == pytest.approx(0.1 + 10 * 1.0)  # asked for before the one before is used


def test_waiting_leaves_the_core_to_others():
    timetable = SCHEDULES.read("gpipe").timetable(2, 6)
    busy = play_shared(timetable, costs_of(2.0, 2.0, 2), 1, lambda active: active)
    waits = play_shared(timetable, costs_of(1.0, 1.0, 2, wait=1.0), 1, lambda active: active)
    assert span(waits) < span(busy)


def test_a_message_crosses_its_wire_beside_the_computation_before_it():
    timetable = SCHEDULES.read("gpipe").timetable(2, 4)
    placed = play_shared(timetable, costs_of(1.0, 1.0, 2, wire=0.5))
    starts = [p.start for p in placed if p.row == 1 and p.action.kind == "F"]
    assert starts == pytest.approx([1.5 + i for i in range(4)])


def test_no_message_enters_its_wire_before_its_receiver_asks():
    timetable = SCHEDULES.read("gpipe").timetable(2, 3)
    placed = play_shared(timetable, costs_of(0.1, 0.1, 2, wire=1.5, latency=1.0))
    starts = [p.start for p in placed if p.row == 1 and p.action.kind == "F"]
    assert starts == pytest.approx(
        [2.6 + (1.0 + 1.5 + 1.0) * i for i in range(3)]
    )  # the word, the wire, the way


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 5), st.integers(2, 3), st.integers(1, 4))
def test_pipelines_that_share_no_wire_stay_in_step(name, ranks, micros, lanes, cores):
    timetable = SCHEDULES.read(name).timetable(ranks, micros)
    given_, slow = costs_of(1.0, 2.0, ranks, latency=0.1), lambda active: max(1.0, active / cores)
    together = play_shared(timetable, given_, lanes, slow)
    apart = play_shared(timetable, given_, 1, slow, lanes)
    assert [(p.row, p.action) for p in apart] == [(p.row, p.action) for p in together]
    assert [p.stop for p in apart] == pytest.approx([p.stop for p in together])


def test_of_two_pipelines_one_computes_while_the_other_has_the_wire():
    """Each is late once, by one message; in step, both would wait for two messages each time."""
    timetable, costs = SCHEDULES.read("gpipe").timetable(2, 1), costs_of(1.0, 1.0, 2, wire=1.0)
    alone = span(play_shared(timetable, costs))
    assert alone == pytest.approx(6.0)
    assert span(play_shared(timetable, costs, 1, lanes=2)) == pytest.approx(alone + 1.0)
    assert span(play_shared(timetable, costs_of(1.0, 1.0, 2, wire=2.0), 2)) == pytest.approx(alone + 2.0)
