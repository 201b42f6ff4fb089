"""When a rank counts as asleep: it neither computes nor waits for a disk, whatever line it is in."""

import time
from pathlib import Path

import pytest

from unisono.launch import pace
from unisono.launch.pace import ASLEEP, FIRST, LEAST, SHARE, Sleep, StepPace
from unisono.launch.rank import watchdog
from unisono.launch.rank.watchdog import Watchdog
from unisono.launch.run import verdict
from unisono.spec.errors import UnisonoError


class Kernel:
    """What the kernel says of a process, as a test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.state = 0.0, "S"
        monkeypatch.setattr(pace.time, "process_time", lambda: self.used)
        monkeypatch.setattr(pace.time, "monotonic", lambda: 0.0)
        monkeypatch.setattr(pace, "process_state", lambda pid: self.state)


def test_one_that_computes_or_waits_for_a_disk_or_a_core_does_not_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel(monkeypatch)
    one = Sleep(by_line=False)
    for now in range(1, 101):
        kernel.used += 2 * SHARE
        one.look(float(now), 5)
        assert one.seconds == 0.0
    for state in ("D", "R"):
        kernel.state = state
        one.look(200.0, 5)
        assert one.seconds == 0.0
    kernel.state = "S"
    one.look(210.0, 5)
    assert one.seconds == 10.0
    one.look(211.0, 6)  # a step more
    assert one.seconds == 0.0
    one.look(311.0, 6, stopped=True)
    assert one.seconds == 0.0


def test_one_that_only_wakes_now_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that looks for a file each half second moves from line to line, and does nothing."""
    kernel = Kernel(monkeypatch)
    one = Sleep(by_line=False)
    for now in range(1, 101):
        kernel.used += SHARE / 5
        one.look(float(now), 5)
    assert one.seconds == 99.0  # since the first look


def test_no_rank_may_sleep_for_two_minutes_unless_the_user_says_so() -> None:
    pace = StepPace()
    assert pace.deadline() == FIRST and pace.asleep() == ASLEEP < 120
    assert LEAST < ASLEEP
    assert StepPace(600.0).asleep() == 600.0


class Quick(StepPace):
    """The default's two moments, sooner: told of from the first on, ended at the second."""

    def deadline(self) -> float:
        return 0.5

    def asleep(self) -> float:
        return 2.0


@pytest.mark.parametrize("pace", [Quick(), StepPace(2.0)], ids=["default", "timeout"])
def test_a_rank_that_is_alone_and_sleeps_is_told_of_and_ended(
    pace: StepPace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = list[UnisonoError]()
    monkeypatch.setattr(watchdog, "status_of", _runs(watchdog.status_of))
    look = Watchdog(0, 1, "here", None, pace, lambda error, mine, kill: ended.append(error))
    look.appear("run", tmp_path)
    until = time.monotonic() + 60
    while not ended and time.monotonic() < until:
        time.sleep(0.01)  # what it does
    look.close()
    assert [(error.code, error.rank) for error in ended] == [("H01", 0)]
    assert "does nothing" in capfd.readouterr().err
    assert verdict.listed([0]) in ended[0].what


def _runs(status_of):
    """As `status_of`, of a rank that is in the user's code: a test is in none."""
    from dataclasses import replace

    return lambda *args, **known: replace(status_of(*args, **known), state="runs")
