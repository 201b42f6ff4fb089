"""Every schedule, found by looking into its folder: what any timetable owes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.plan.grammar import known
from unisono.programs.pipeline import Timetable, needs, play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError

NAMES = SCHEDULES.names()


def served(name: str, ranks: int, micros: int) -> Timetable | None:
    """The timetable, or None where the schedule refuses these numbers and says which it takes."""
    try:
        return SCHEDULES.read(name).timetable(ranks, micros)
    except UsageError as refusal:
        assert refusal.fix
        return None


def test_the_contract_names_are_found() -> None:
    assert set(NAMES) == set(known("schedule"))
    assert all(SCHEDULES.find(name).name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@given(ranks=st.integers(1, 8), micros=st.integers(1, 16), data=st.data())
@settings(max_examples=15, deadline=None)
def test_each_computation_begins_as_soon_as_it_can(
    name: str, ranks: int, micros: int, data: st.DataObject
) -> None:
    """What `play_costs` means, said of its result: this and each row's order leave only one placement."""
    timetable = served(name, ranks, micros)
    if timetable is None:
        return
    drawn = st.lists(st.floats(0, 4), min_size=timetable.stages, max_size=timetable.stages)
    forward, backward, weight = (data.draw(drawn) for _ in range(3))
    send = data.draw(st.floats(0, 2))
    placed = play_costs(timetable, forward, backward, send, weight)
    assert placed == sorted(placed, key=lambda p: (p.start, p.row))
    over = {(p.action.kind, p.action.stage, p.action.micro): p for p in placed}
    for row, actions in enumerate(timetable.rows):
        free = 0.0
        for action in actions:
            p = over[action.kind, action.stage, action.micro]
            wanted = needs(action, timetable.length, timetable.splits_backward)
            sources = [over[kind, stage, action.micro] for kind, stage in wanted]
            assert p.start == max([free, *(q.stop + send * (q.row != row) for q in sources)])
            assert p.stop == p.start + {"F": forward, "B": backward, "W": weight}[action.kind][action.stage]
            free = p.stop


def test_unknown_names_and_options_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="no schedule"):
        SCHEDULES.read("nonsense")
    with pytest.raises(UsageError, match="takes no option v"):
        SCHEDULES.read("gpipe:v")
    with pytest.raises(UsageError, match="takes no option v"):
        SCHEDULES.read("gpipe:v=2")
    with pytest.raises(UsageError, match="takes no option costs"):
        SCHEDULES.read("zb1p:costs=2")
    with pytest.raises(UsageError, match="takes no option ranks"):
        SCHEDULES.read("interleaved:ranks=2")
    assert SCHEDULES.read("interleaved:v=3").timetable(2, 4).stages == 6
