"""Rows of ranks, put together call by call."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.late import line, lines, nobody, steps
from unisono.report.calls import StepCalls, group_of, rank_step
from unisono.report.calls import steps as steps_of
from unisono.report.collect import collect

OWN = {"forward": 0.1, "backward": 0.2}


def row(arrived: float, done: float, wanted: float, axis: str = "dp", number: int = 0) -> list[Any]:
    return [axis, "all_reduce", 1024, "backward", "blocks.0", arrived, done, wanted, number]


def step(*said: dict[str, Any], places: dict[int, dict[str, int]] | None = None) -> StepCalls:
    (one,) = steps([list(said)], places)
    return one


def test_waiting_apart_from_moving() -> None:
    one = step(
        line(1, 0, OWN, 0.2, [row(0.1, 0.33, 0.1)]),
        line(1, 1, OWN, 0.0, [row(0.3, 0.34, 0.3)]),
    )
    (call,) = one.meetings
    assert call.last == 1 and call.waiting == pytest.approx({0: 0.2, 1: 0.0})
    assert call.moving == pytest.approx(0.03) and call.is_timed
    assert one.waiting == pytest.approx({0: 0.2, 1: 0.0})
    assert one.lateness == pytest.approx({0: -0.1, 1: 0.1})


def test_steps_that_begin_at_other_times_are_on_one_axis() -> None:
    """A rank that began later arrived later, though its own seconds say the same."""
    early, late = line(1, 0, OWN, 0.0, [row(0.1, 0.2, 0.1)]), line(1, 1, OWN, 0.0, [row(0.1, 0.15, 0.1)])
    late["start"] = early["start"] + 0.05
    (call,) = step(early, late).meetings
    assert call.last == 1 and call.waiting[0] == pytest.approx(0.05, abs=1e-6)


def test_a_wait_beside_computing_is_none() -> None:
    one = step(
        line(1, 0, OWN, 0.0, [row(0.1, 0.31, 0.31)]),
        line(1, 1, OWN, 0.0, [row(0.3, 0.32, 0.31)]),
    )
    assert one.meetings[0].waiting[0] == pytest.approx(0.2) and one.waiting[0] == 0.0
    assert not one.meetings[0].is_timed, "it was over before anybody wanted it"


def test_groups_of_one_axis_are_told_apart_by_their_place() -> None:
    places = {rank: {"dp": rank // 2, "tp": rank % 2} for rank in range(4)}
    said = [line(1, rank, OWN, 0.0, [row(0.1 * rank, 0.5, 0.4, axis="tp")]) for rank in range(4)]
    assert [sorted(call.arrived) for call in step(*said, places=places).meetings] == [[0, 1], [2, 3]]
    said = [line(1, rank, OWN, 0.0, [row(0.1 * rank, 0.5, 0.4)]) for rank in range(4)]
    assert [sorted(call.arrived) for call in step(*said, places=places).meetings] == [[0, 2], [1, 3]]
    said = [line(1, rank, OWN, 0.0, [row(0.1 * rank, 0.5, 0.4, axis="world")]) for rank in range(4)]
    assert [sorted(call.arrived) for call in step(*said, places=places).meetings] == [[0, 1, 2, 3]]
    assert group_of("shard+tp", {"dp": 1, "shard": 1, "tp": 1}) == (("dp", 1),)


def test_calls_are_matched_by_their_numbers_not_by_their_places() -> None:
    """One rank has left a row out."""
    one = step(
        line(1, 0, OWN, 0.0, [row(0.1, 0.2, 0.1, number=0), row(0.3, 0.5, 0.3, number=7)]),
        line(1, 1, OWN, 0.0, [row(0.4, 0.5, 0.4, number=7)], calls_left_out=1),
    )
    (call,) = one.meetings
    assert call.waiting == pytest.approx({0: 0.1, 1: 0.0}) and one.ranks[1].left_out == 1


def test_rows_of_seven_are_read() -> None:
    mine = rank_step(0, line(3, 0, OWN, 0.0, [["dp", "all_reduce", 8, "optim", "", 0.1, 0.2]]))
    assert mine is not None and mine.calls[0].exposed == pytest.approx(0.1) and mine.calls[0].number == 0


junk = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {"step": junk, "time": junk, "start": junk, "calls": st.lists(junk, max_size=4) | junk},
        optional={"modules": junk, "clock": junk, "calls_left_out": junk},
    )
)
def test_damaged_lines_are_left_out_not_fatal(said: dict[str, Any]) -> None:
    mine = rank_step(0, said)
    assert mine is None or mine.step == said["step"]


def test_a_run_of_before_has_none(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    old = {"kind": "step", "step": 1, "rank": 0, "time": OWN, "bytes": {}, "mem_mib": 1.0}
    (tmp_path / "events/rank0.jsonl").write_text(json.dumps(old) + "\n")
    assert steps_of(collect(tmp_path).ranks) == []


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    for rank in range(4):
        info = {"kind": "info", "rank": rank, "host": "a", "coords": {"dp": rank, "pp": 0}}
        mine = [of_step[rank] for of_step in lines(nobody, steps=5)]
        text = "".join(json.dumps(said) + "\n" for said in [info, *mine])
        (tmp_path / f"events/rank{rank}.jsonl").write_text(text)
    read = steps_of(collect(tmp_path).ranks)
    assert [one.step for one in read] == [1, 2, 3, 4, 5]
    assert all(sorted(call.arrived) == [0, 1, 2, 3] for one in read for call in one.meetings)
