"""The log of calls: numbers that ranks share, what is held back, which rows stay."""

from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.calls import CallLog, LoggedCall, rows
from unisono.observe.span import Recorder


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def call(log: CallLog, clock: Clock, takes: int, axis: str = "dp", op: str = "all_reduce") -> LoggedCall:
    one = log.begin(axis, op, 8, "backward")
    clock.now += takes
    one.ends()
    return one


def test_calls_are_numbered_by_axis_and_operation_and_anew_in_each_step() -> None:
    clock = Clock()
    log = CallLog(clock)
    for axis, op in (("dp", "all_reduce"), ("tp", "all_reduce"), ("dp", "all_reduce"), ("dp", "barrier")):
        call(log, clock, 5, axis, op)
    assert [one.number for one in log.take()] == [0, 0, 1, 0]
    call(log, clock, 5)
    assert [one.number for one in log.take()] == [0]


def test_a_call_under_way_comes_with_the_step_in_which_it_ends() -> None:
    clock = Clock()
    log = CallLog(clock)
    late = log.begin("dp", "all_reduce", 8, "backward")
    clock.now = 2_000_000
    assert log.take() == []
    clock.now = 3_000_000
    late.ends()
    said, left_out = rows(log.take(), start_ns=2_000_000)
    assert said == [["dp", "all_reduce", 8, "backward", "", -0.002, 0.001, -0.002, 0]], (
        "it began a step before"
    )
    assert left_out == 0 and log.take() == []


def test_a_call_has_the_part_of_the_step_around_it_and_the_module_at_hand() -> None:
    clock = Clock()
    clock.now = 1
    recorder = Recorder(clock=clock)
    with recorder.span("backward"), recorder.span("wait"):
        recorder.calls.module = "blocks.2.mlp"
        recorder.call("dp", "all_reduce", 4).ends()
    recorder.calls.module = ""
    recorder.call("world", "barrier", 0).ends()
    assert [(one.phase, one.module) for one in recorder.lap().calls] == [
        ("backward", "blocks.2.mlp"),
        ("other", ""),
    ]


def test_what_a_rank_waited_is_no_time_of_its_own() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    with recorder.span("backward"):
        clock.now += 100
        with recorder.span("comm", axis="dp", op="all_reduce", exposed=True):
            clock.now += 30
        with recorder.span("wait"):
            clock.now += 7
    recorder.add("comm", 0, 90, exposed=False)
    assert recorder.blocked_ns == 37


@given(st.integers(2, 400), st.integers(0, 399), st.integers(2, 64))
def test_the_call_for_which_others_waited_stays_on_both_sides(count: int, place: int, most: int) -> None:
    """One rank works long before a call, the other waits for it there: both keep the row of that call."""
    place %= count
    for late in (False, True):
        clock = Clock()
        log = CallLog(clock)
        for number in range(count):
            clock.now += 100 + (100_000 if late and number == place else 0)
            call(log, clock, 10 + (100_000 if not late and number == place else 0))
        said, left_out = rows(log.take(), 0, most)
        assert place in [row[8] for row in said]
        assert len(said) == min(count, most) and left_out == count - len(said)
        assert [row[8] for row in said] == sorted(row[8] for row in said)


def test_rare_kinds_stay_whatever_they_took() -> None:
    """A replica that waits inside itself is late for the others in a call before which nobody worked or waited long."""
    clock = Clock()
    log = CallLog(clock)
    for number in range(100):
        call(log, clock, 1000 + number, "tp", "all_gather")
        clock.now += 500
    call(log, clock, 1, "dp", "all_reduce")
    call(log, clock, 1, "dp", "all_gather")
    said, left_out = rows(log.take(), 0, 8)
    assert [row[:2] for row in said[-2:]] == [["dp", "all_reduce"], ["dp", "all_gather"]]
    assert len(said) == 8 and left_out == 94


def test_where_nobody_takes_them_the_latest_are_held() -> None:
    """A loop of a user's own asks for no lap."""
    clock = Clock()
    clock.now = 1
    log = CallLog(clock)
    for _ in range(10_000):
        call(log, clock, 1)
    held = log.take()
    assert len(held) < 5000 and held[-1].number == 9999
