"""Places of peers: one for each name, kept, whoever comes when; heartbeats on a thread; stores that fail for a moment."""

import threading
from functools import partial
from io import BytesIO
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from unisono.spec.errors import UsageError
from unisono_contrib.comm.depot import Depot, FolderDepot
from unisono_contrib.comm.mailbox import Mailbox
from unisono_contrib.comm.mailbox.heartbeat import Heartbeats
from unisono_contrib.comm.mailbox.places import take_place
from unisono_contrib.comm.mailbox.steady import PAUSES, SteadyDepot

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("order", [*permutations("abc")])
def test_who_begins_together_has_the_places_of_their_names(tmp_path: Path, order: tuple[str, ...]) -> None:
    depot = FolderDepot(tmp_path)
    for i, name in enumerate(order[:2]):
        living = partial(sorted, order[: i + 1])
        assert take_place(depot, name, living, 3) is None
    for name in (order[2], *order):
        assert take_place(depot, name, lambda: sorted(order), 3) == "abc".index(name)
    assert take_place(depot, "0", lambda: ["0", *sorted(order)], 3) == 3
    assert take_place(depot, "zz", lambda: ["zz"], 3) == 4
    assert take_place(depot, "b", lambda: ["b"], 3) == 1


def test_no_two_that_come_at_once_get_one_place(tmp_path: Path) -> None:
    places: dict[str, int | None] = {}

    def come(name: str) -> None:
        places[name] = take_place(FolderDepot(tmp_path), name, lambda: [name], 1)

    peers = [threading.Thread(target=come, args=(f"p{i}",)) for i in range(8)]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join()
    assert sorted(place for place in places.values() if place is not None) == [*range(8)]


class Flaky(Depot):
    """Fails so many times before each operation."""

    def __init__(self, inner: Depot, fails: int) -> None:
        self._inner, self.fails, self._left = inner, fails, fails

    def _do(self, name: str, *words: Any) -> Any:
        if self._left:
            self._left -= 1
            raise ConnectionError("the network is down")
        self._left = self.fails
        return getattr(self._inner, name)(*words)

    def names(self, folder: str) -> list[str]:
        return self._do("names", folder)

    def put(self, source: Any, path: str, moved: Any) -> None:
        self._do("put", source, path, moved)

    def get(self, path: str, target: Any, limit: int, moved: Any) -> None:
        self._do("get", path, target, limit, moved)

    def drop(self, path: str) -> None:
        self._do("drop", path)

    def create(self, path: str, content: bytes) -> bool:
        return self._do("create", path, content)


def test_a_store_that_fails_for_a_moment_is_tried_again_and_bytes_count_once(tmp_path: Path) -> None:
    slept: list[float] = []
    depot = SteadyDepot(Flaky(FolderDepot(tmp_path), len(PAUSES)), "launch.mailbox", slept.append)
    depot.write("a/x", b"12345")
    assert slept == [*PAUSES]
    assert depot.create("a/y", b"123") and not depot.create("a/y", b"9")
    assert depot.read("a/x", 10) == b"12345" and depot.names("a") == ["x", "y"]
    target = BytesIO()
    depot.get("a/y", target, 10, lambda count: None)
    assert target.getvalue() == b"123"
    assert (depot.sent, depot.received) == (5 + 3 + 1, 5 + 3)
    with pytest.raises(FileNotFoundError):
        depot.read("a/z", 10)


def test_a_store_that_stays_away_ends_the_run_in_words(tmp_path: Path) -> None:
    depot = SteadyDepot(Flaky(FolderDepot(tmp_path), len(PAUSES) + 1), "launch.mailbox", lambda seconds: None)
    with pytest.raises(UsageError, match="the store does not answer: the network is down") as error:
        depot.names("a")
    assert (error.value.code, error.value.where) == ("E02", "launch.mailbox")


def test_heartbeats_go_on_beside_slow_steps_and_say_who_else_took_the_name(tmp_path: Path) -> None:
    seen = Mailbox(FolderDepot(tmp_path), "watcher")
    heart = Heartbeats(Mailbox(FolderDepot(tmp_path), "milan", alive_s=0.04))
    beats: set[int] = set()
    while len(beats) < 3:
        seen.peers()
        beats |= {int(beat.said["beat"]) for beat in seen._seen.values()}
    heart.check()
    thief = Mailbox(FolderDepot(tmp_path), "milan")
    thief.beat(0)
    while heart._error is None:
        thief.peers()
    with pytest.raises(UsageError, match="another process has become peer milan"):
        heart.check()
    heart.close()
