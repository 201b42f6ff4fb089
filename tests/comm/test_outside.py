"""Waiting for what lies outside of a run: all ranks wait with the first one, and a watchdog sees that they do."""

import threading

import pytest
import torch

from unisono.comm import outside
from unisono.comm.group import Group
from unisono.comm.outside import OutsideWait
from unisono.launch.pace import StepPace
from unisono.launch.rank.watchdog import Watchdog, _turns
from unisono.observe.span import Recorder
from unisono_contrib.comm import threads

pytestmark = pytest.mark.timeout(30)


def alone() -> OutsideWait:
    return OutsideWait(Group("world", [0], 0, None, Recorder(0)), torch.device("cpu"))


def test_the_first_rank_gets_what_the_work_returns_or_raises() -> None:
    assert alone().until(lambda: 7) == 7
    with pytest.raises(OSError, match="no network"):
        alone().until(lambda: (_ for _ in ()).throw(OSError("no network")))


def test_other_ranks_wait_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_TURN", 0.01)
    over = threading.Event()

    def rank_of(rank: int) -> tuple[int | None, int]:
        group = Group("world", [0, 1], rank, torch.distributed.group.WORLD, Recorder(rank))
        wait = OutsideWait(group, torch.device("cpu"))

        def work() -> int:
            while wait.turns < 3:
                over.wait(0.001)
            return 7

        return wait.until(work), wait.turns

    (first, turns), (other, same) = threads.run(2, rank_of)
    assert (first, other) == (7, None) and turns == same >= 3


def test_a_watchdog_sees_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_TURN", 0.01)
    over = threading.Event()
    thread = threading.Thread(target=lambda: alone().until(over.wait), daemon=True)
    thread.start()
    seen: set[int] = set()
    while len(seen) < 3:
        seen.add(_turns(thread))
    over.set()
    thread.join(10)
    assert _turns(thread) == 0


def test_a_watchdog_ends_who_sleeps_and_lets_wait_who_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outside, "_TURN", 0.05)
    ended: list[object] = []
    dog = Watchdog(0, 1, "here", None, StepPace(0.3), lambda error, mine, kill: ended.append(error))
    dog.watch_alone()
    looks = threading.Event()
    try:
        alone().until(lambda: looks.wait(1.5))
        assert not ended
        while not ended:
            looks.wait(0.2)  # asleep, as far as anybody can see
    finally:
        dog.close()
