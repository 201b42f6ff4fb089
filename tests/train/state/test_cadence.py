"""When checkpoints come, alike on all ranks; and what is known of the time of steps and saves."""

import threading
from collections.abc import Callable

import pytest

from unisono.spec.interval import daly
from unisono.train.state.cadence import FIRST, Chosen, Clock, Fixed

DAY = 86400.0


class Shared:
    """A store of threads: a key that is not there yet is waited for."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._news = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._news:
            self._kept[key] = value
            self._news.notify_all()

    def get(self, key: str) -> str:
        with self._news:
            assert self._news.wait_for(lambda: key in self._kept, 20.0)
            return self._kept[key]


def measured(step: float, save: float) -> Clock:
    clock = Clock()
    for _ in range(5):
        clock.stepped(step)
        clock.saved(save)
    return clock


def test_a_number_of_steps() -> None:
    assert [made for made in range(1, 13) if Fixed(4).due(made)] == [4, 8, 12]
    assert not any(Fixed(0).due(made) for made in range(1, 13))
    assert Fixed(4).saved(4) == ""


def of_a_day() -> tuple[float, int]:
    return DAY, 0


def test_the_next_one_follows_dalys_interval_and_is_told_with_its_sum() -> None:
    chosen = Chosen(measured(0.5, 0.2), 0, Shared(), of_a_day, FIRST)
    assert [made for made in range(1, FIRST + 1) if chosen.due(made)] == [FIRST]
    said = chosen.saved(FIRST)
    every = round(daly(0.2, DAY) / 0.5)
    assert chosen.every == every and chosen.next == FIRST + every
    assert said == (
        f"a checkpoint every {every} steps, 3 min: sqrt(2 x 200 ms to save x 24 h 00 min between failures"
        " (none seen: launch.mtbf_hours)), in Daly's higher order"
    )
    assert chosen.saved(chosen.next) == "", "the same again is no news"
    assert chosen.every == every


def test_failures_bring_checkpoints_closer() -> None:
    seen = [(DAY, 0), (DAY / 100, 3)]
    chosen = Chosen(measured(0.5, 0.2), 0, Shared(), lambda: seen.pop(0), FIRST)
    chosen.saved(FIRST)
    before = chosen.every
    assert "(3 seen)" in chosen.saved(chosen.next)
    assert chosen.every == pytest.approx(before / 10, rel=0.02)


@pytest.mark.timeout(60)
def test_ranks_with_other_clocks_save_after_the_same_steps() -> None:
    """Each has its own times, and rank 0's count."""
    store, found = Shared(), dict[int, list[int]]()

    def live(rank: int, between: Callable[[], tuple[float, int]]) -> None:
        chosen = Chosen(measured(0.5 * (rank + 1), 0.2 + rank), rank, store, between, FIRST)
        saved = []
        for made in range(1, 5000):
            if chosen.due(made):
                chosen.saved(made)
                saved.append(made)
        found[rank] = saved

    ranks = [threading.Thread(target=live, args=(rank, of_a_day)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30.0)
    assert found[0] == found[1] == found[2] and len(found[0]) > 5


def test_nobody_knows_when_a_step_ends_before_some_have() -> None:
    clock = Clock()
    clock.stepped(2.0)
    assert clock.next_end() is None and clock.step() == 2.0 and clock.saving() == 0.0
    clock.stepped(1.0)
    clock.stepped(1.0)
    ends = clock.next_end()
    assert ends is not None and clock.step() == 1.0
