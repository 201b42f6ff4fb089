"""Every schedule, found by looking into its folder: what any timetable owes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.plan.grammar import known, played
from unisono.programs.check import check
from unisono.programs.pipeline import Timetable, bubble, lower, needs, peak_held, play_costs
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
    assert set(NAMES) == set(known("schedule")) - {"pipedream"}
    assert set(played("schedule")) <= set(NAMES)
    assert all(SCHEDULES.find(name).name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks, micros", [(2, 4), (4, 8), (8, 16)])
def test_serves_even_ranks_and_twice_as_many_micro_batches(name: str, ranks: int, micros: int) -> None:
    """What every schedule takes, so that it is tested at all where others are refused."""
    assert served(name, ranks, micros) is not None


@pytest.mark.parametrize("name", NAMES)
@given(ranks=st.integers(1, 8), micros=st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_is_complete_ordered_and_free_of_deadlock(name: str, ranks: int, micros: int) -> None:
    timetable = served(name, ranks, micros)
    if timetable is None:
        return
    assert check(timetable) == []
    assert len(timetable.rows) == ranks
    assert timetable.micros == micros
    assert timetable.stages % ranks == 0


@pytest.mark.parametrize("name", NAMES)
@given(ranks=st.integers(1, 8), micros=st.integers(1, 16))
@settings(max_examples=20, deadline=None)
def test_is_no_worse_than_one_micro_batch_at_a_time(name: str, ranks: int, micros: int) -> None:
    timetable = served(name, ranks, micros)
    if timetable is None:
        return
    placed = play_costs(timetable)
    assert bubble(placed) <= (ranks - 1) / ranks + 1e-12
    assert len(placed) == sum(len(row) for row in timetable.rows)


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


@pytest.mark.parametrize("name", NAMES)
def test_is_a_pure_function_with_a_docstring(name: str) -> None:
    schedule = SCHEDULES.read(name)
    assert schedule.timetable(4, 8) == schedule.timetable(4, 8)
    assert schedule.summary()


@pytest.mark.parametrize("name", NAMES)
def test_each_backward_sums_in_the_same_order(name: str) -> None:
    """Gradients of a stage are summed in ascending micro-batch order, so schedules agree bit for bit."""
    timetable = SCHEDULES.read(name).timetable(4, 8)
    last = "W" if timetable.splits_backward else "B"
    for row in timetable.rows:
        for stage in {a.stage for a in row}:
            micros = [a.micro for a in row if a.kind == last and a.stage == stage]
            assert micros == list(timetable.micros_of(stage))


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_holds_and_sends_nothing_to_itself(name: str) -> None:
    timetable = served(name, 1, 4)
    if timetable is None:
        pytest.skip("not on one rank")
    assert all(action.kind in ("F", "B", "W") for row in lower(timetable).rows for action in row)
    assert all(1 <= held <= 4 * timetable.stages for held in peak_held(timetable))


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
