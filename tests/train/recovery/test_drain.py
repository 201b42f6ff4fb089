"""Saving within a step: all ranks at the same one, or none; and no later than the grace allows."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.train.recovery.drain import Drain, DrainParts, due
from unisono.train.state.cadence import Clock

pytestmark = pytest.mark.timeout(60)
GRACE = 1.0


class Shared:
    """A store of threads."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


class Line:
    """A rank's channel. asked: whether a signal came to this rank."""

    hears = True

    def __init__(self, asked: bool = True) -> None:
        self.asked, self.text, self.notes = asked, "", list[str]()
        self.over, self.noted = threading.Event(), threading.Event()

    def send(self, kind: str, **fields: Any) -> None:
        self.notes.append(fields["text"])
        self.noted.set()

    def stop_requested(self) -> bool:
        return self.asked

    def hurried(self) -> bool:
        return self.asked

    def hurry(self) -> None:
        self.asked = True

    def drain(self) -> None:
        return

    def drained(self, text: str) -> None:
        self.text = text
        self.over.set()


class Rank:
    """A rank in the middle of a step, as its drain sees it."""

    def __init__(self, rank: int, store: Shared, step: int, asked: bool = True, **kept: Any) -> None:
        self.line, self.saved = Line(asked), list[int]()
        store_of_layers = SimpleNamespace(most=0)
        self.run: Any = SimpleNamespace(
            gate=threading.Lock(), step=step, mesh=SimpleNamespace(rank=rank),
            gradients=SimpleNamespace(overlap=False),
            sync=SimpleNamespace(state=lambda: kept, equal=True), local=SimpleNamespace(store=store_of_layers, routers=(), stages={}),
        )  # fmt: skip
        settled = threading.Event()
        settled.set()
        self.parts = DrainParts(self.run, Clock(), self.line, store, 2, GRACE, self._save, settled.is_set)

    def _save(self) -> Path | None:
        self.saved.append(self.run.step)
        return Path("checkpoints/step") if self.run.step else None


def test_all_save_what_the_last_step_left_and_the_gate_stays_shut() -> None:
    store = Shared()
    ranks = [Rank(rank, store, step=3, asked=rank == 1) for rank in range(2)]
    with Drain(ranks[0].parts), Drain(ranks[1].parts):
        assert all(rank.line.over.wait(30.0) for rank in ranks), "the other rank heard of it"
    assert [rank.saved for rank in ranks] == [[3], [3]]
    assert ranks[0].line.text == "stopped as asked, within a step; the run is saved as of step 3"
    assert all(rank.run.gate.locked() for rank in ranks), "no update follows"


def test_where_one_rank_has_gone_through_the_others_follow_first() -> None:
    store = Shared()
    ranks = [Rank(rank, store, step=3) for rank in range(2)]
    ranks[1].run.step = 4
    with Drain(ranks[0].parts), Drain(ranks[1].parts):
        while not store.check(["drain/0/0", "drain/0/1"]):
            assert not ranks[0].line.over.wait(0.01)
        with ranks[0].run.gate:  # its update, which the drain lets it make
            ranks[0].run.step = 4
        assert all(rank.line.over.wait(30.0) for rank in ranks)
    assert [rank.saved for rank in ranks] == [[4], [4]]


def test_before_the_first_step_nothing_is_saved() -> None:
    store = Shared()
    ranks = [Rank(rank, store, step=0) for rank in range(2)]
    with Drain(ranks[0].parts), Drain(ranks[1].parts):
        assert all(rank.line.over.wait(30.0) for rank in ranks)
    assert ranks[0].line.text == "stopped as asked, before the first step had ended"


def test_what_steps_change_is_not_saved_within_one() -> None:
    store = Shared()
    ranks = [Rank(rank, store, step=3, left="something") for rank in range(2)]
    with Drain(ranks[0].parts), Drain(ranks[1].parts):
        assert ranks[0].line.noted.wait(30.0)
    assert ranks[0].line.notes[0].startswith("the policy's own state changes within a step")
    assert [rank.saved for rank in ranks] == [[], []]


def test_nobody_who_ended_in_time_is_waited_for() -> None:
    store = Shared()
    rank = Rank(0, store, step=3)
    drain = Drain(rank.parts)
    with drain:
        pass
    drain._thread.join(10.0)
    assert not drain._thread.is_alive() and not rank.saved and not rank.run.gate.locked()


def test_a_step_is_given_up_as_late_as_a_save_allows_or_at_once() -> None:
    clock = Clock()
    assert due(clock, 100.0, 10.0) == 107.0, "nobody knows yet what a save takes"
    clock.saved(2.0)
    assert due(clock, 100.0, 10.0) == 105.0
    clock.saved(60.0)
    clock.saved(60.0)
    assert due(clock, 100.0, 10.0) == 103.0, "steps get some of it, however long saves take"
    for _ in range(3):
        clock.stepped(0.1)
    now = clock._ended
    assert due(clock, now, 10.0) == pytest.approx(now + 3.0)
    for _ in range(9):
        clock.stepped(60.0)
    now = clock._ended
    assert due(clock, now, 10.0) == now, "it will not end in time"
