"""A meeting is left as often as anybody likes, by any thread, and what is connected after the next began is not its."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from unisono.launch.rank import meetings
from unisono.launch.rank.meetings import Meeting
from unisono.spec.rendezvous import RankMeeting


class Socket:
    """A connection of a group. cut, closed: how often it was."""

    def __init__(self) -> None:
        self.cut, self.closed = 0, 0

    def close(self) -> None:
        self.closed += 1


class Process:
    """The connections of this process's groups, in the place of `comm.parting`."""

    def __init__(self) -> None:
        self.open: list[Socket] = []

    def connect(self) -> Socket:
        self.open.append(Socket())
        return self.open[-1]

    def cut(self) -> list[Socket]:
        held, self.open = self.open, []
        for sock in held:
            sock.cut += 1
        return held

    def hang_up(self, size: int) -> None:
        return

    def forget(self) -> None:
        return


class Beside:
    """A store, and a watchdog."""

    def __init__(self, *given: Any) -> None:
        self.ends = 0

    def end(self) -> None:
        self.ends += 1

    dismiss = end

    def anew(self, prefix: str) -> "Beside":
        return Beside()


def place(epoch: int) -> RankMeeting:
    return RankMeeting(epoch, 0, 2, 2, 0, 2)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(meetings, "parting", process)
    return process


def test_a_meeting_is_left_once_however_often_it_is_asked(process: Process) -> None:
    first = Meeting(place(0), Beside(), Beside)  # type: ignore[arg-type]
    connection = process.connect()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            threads.submit(first.leave)
    assert (first.watchdog.ends, first.store.ends, connection.cut) == (1, 1, 1)  # type: ignore[attr-defined]


def test_what_is_connected_after_the_next_began_is_the_nexts(process: Process) -> None:
    first = Meeting(place(0), Beside(), Beside)  # type: ignore[arg-type]
    early = process.connect()
    first.leave()
    late = process.connect()  # the main thread had not heard of it yet
    second = first.next(place(1))
    mine = process.connect()
    first.leave()  # whoever still has the old one
    assert (early.cut, late.cut, mine.cut) == (1, 1, 0)
    assert (early.closed, late.closed) == (0, 0), "others may still be in the first"
    second.leave()
    assert (early.closed, late.closed, mine.cut, mine.closed) == (1, 1, 1, 0)
