"""Peers without a connection: all who ask get the same letters, whoever comes, goes, hangs or is late."""

import os
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from unisono.spec.errors import HangError, PeerGone, UsageError
from unisono_contrib.comm.depot import Depot, depot_at
from unisono_contrib.comm.mailbox import Mailbox, mean, open_mailbox
from unisono_contrib.comm.mailbox.letters import sealed

pytestmark = pytest.mark.timeout(60)


class Time:
    """A clock that moves when somebody sleeps; then `events` that are due happen, in this thread."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, list[tuple[float, Callable[[], object]]]()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in [event for event in self.events if event[0] <= self.now]:
            self.events.remove(event)
            event[1]()


class Town:
    """Peers of one mailbox in one thread, on one clock."""

    def __init__(self, depot: Depot | None = None) -> None:
        self.depot, self.time = depot or depot_at(f"memory://{uuid4().hex}", "mailbox"), Time()

    def peer(self, name: str, **options: float) -> Mailbox:
        patient = {"alive_s": 30.0, **options}
        return Mailbox(self.depot, name, clock=self.time.clock, sleep=self.time.sleep, **patient)  # type: ignore[arg-type]


def of(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((4,), value)}


def names(letters: object) -> list[str]:
    return [letter.peer for letter in letters]  # type: ignore[attr-defined]


def test_all_get_the_letters_of_all_in_the_order_of_names() -> None:
    town = Town()
    c, a, b = (town.peer(name) for name in "cab")
    for box, value in ((c, 1.0), (a, 2.0), (b, 4.0)):
        box.beat(0)
        box.post(0, of(value), weight=value)
    letters = [box.collect(0) for box in (a, b, c)]
    assert all(names(each) == ["a", "b", "c"] for each in letters)
    assert torch.equal(mean(letters[0])["x"], mean(letters[2])["x"])
    assert mean(letters[0])["x"][0].item() == pytest.approx((2 * 2 + 4 * 4 + 1) / 7)
    assert [(peer.name, peer.round) for peer in a.peers()] == [("a", 0), ("b", 0), ("c", 0)]


def test_who_lives_and_has_not_posted_is_waited_for() -> None:
    town = Town()
    a, b = town.peer("a"), town.peer("b")
    b.beat(0)
    a.post(0, of(1.0))
    town.time.events.append((9.0, lambda: b.post(0, of(3.0))))
    assert names(a.collect(0)) == ["a", "b"] and town.time.now >= 9.0


def test_a_peer_that_falls_silent_is_waited_for_until_its_heartbeat_is_old() -> None:
    town = Town()
    a, b = town.peer("a", alive_s=20.0), town.peer("b")
    b.beat(0)
    a.post(0, of(1.0))
    assert names(a.collect(0)) == ["a"] and 20.0 <= town.time.now < 25.0


def test_who_leaves_is_not_waited_for() -> None:
    town = Town()
    a, b = town.peer("a"), town.peer("b")
    b.beat(0)
    a.post(0, of(1.0))
    b.leave()
    assert names(a.collect(0)) == ["a"] and town.time.now == 0.0


def test_a_quorum_waits_for_the_others_no_longer_than_its_grace() -> None:
    town = Town()
    boxes = [town.peer(name, alive_s=1e9) for name in "abc"]
    for box in boxes:
        box.beat(0)
    a, b, c = boxes
    b.post(0, of(2.0))
    a.post(0, of(1.0))
    assert names(a.collect(0, quorum=2, grace_s=5.0)) == ["a", "b"] and 5.0 <= town.time.now < 8.0
    c.post(0, of(9.0))  # too late, and everybody agrees on that
    assert [names(box.collect(0, quorum=2)) for box in boxes] == [["a", "b"]] * 3


def test_who_comes_within_the_grace_counts() -> None:
    town = Town()
    boxes = [town.peer(name, alive_s=1e9) for name in "abc"]
    for box in boxes:
        box.beat(0)
    boxes[0].post(0, of(1.0))
    boxes[1].post(0, of(1.0))
    town.time.events.append((3.0, lambda: boxes[2].post(0, of(1.0))))
    assert names(boxes[0].collect(0, quorum=2, grace_s=60.0)) == ["a", "b", "c"] and town.time.now < 6.0


def test_one_decides_and_another_one_where_that_dies() -> None:
    town = Town()
    a, b = town.peer("a"), town.peer("b")
    a.post(0, of(1.0))  # and dies
    b.post(0, of(2.0))
    letters = b.collect(0)
    assert names(letters) == ["a", "b"] and town.time.now >= 30.0
    assert names(town.peer("a").collect(0)) == ["a", "b"]  # started anew


def test_a_joiner_begins_with_the_last_weights_and_a_leaver_is_missed_by_nobody() -> None:
    town = Town()
    a, b = town.peer("a"), town.peer("b")
    weights = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3)}

    def step(round: int, boxes: list[Mailbox]) -> None:
        for box in boxes:
            box.post(round, {"x": torch.ones(3) * (round + ord(box.peer))}, weight=10.0)
        for box in boxes:
            weights[box.peer] += mean(box.collect(round))["x"]
            box.publish(round + 1, {"x": weights[box.peer]}, {"round": round + 1})

    assert a.join() == (0, None) and b.join() == (0, None)
    step(0, [a, b])
    step(1, [a, b])
    c = town.peer("c")
    round, start = c.join()
    assert round == 2 and start is not None and start.meta == {"round": 2}
    weights["c"] += start.tensors["x"]
    step(2, [a, b, c])
    a.leave()
    step(3, [b, c])
    assert torch.equal(weights["b"], weights["c"]) and not torch.equal(weights["a"], weights["b"])
    assert [peer.name for peer in c.peers()] == ["b", "c"]


def test_of_old_rounds_nothing_stays_and_who_slept_through_them_is_told(tmp_path: Path) -> None:
    town = Town(depot_at(str(tmp_path), "mailbox"))
    a, z = town.peer("a", keep=1), town.peer("z", keep=1)
    for round in range(5):
        a.post(round, of(1.0))
        a.collect(round)
        assert a.publish(round + 1, of(1.0))
    assert sorted(path.name for path in (tmp_path / "rounds").iterdir()) == ["00000004"]
    assert sorted(path.name for path in (tmp_path / "outer").iterdir()) == ["00000005"]
    z.post(1, of(1.0))
    with pytest.raises(PeerGone, match=r"round 1 is over, .* others begin round 5"):
        z.collect(1)
    assert z.join()[0] == 5


def test_a_torn_publication_is_no_weights_to_begin_with(tmp_path: Path) -> None:
    town = Town(depot_at(str(tmp_path), "mailbox"))
    a = town.peer("a")
    for round in (1, 2):
        assert a.publish(round, of(float(round)))
    body = next((tmp_path / "outer/00000002").glob("*.safetensors"))
    body.write_bytes(body.read_bytes()[:-1])
    round, start = town.peer("b").join()
    assert round == 1 and start is not None and start.tensors["x"][0] == 1.0


def test_a_quorum_that_never_comes_is_an_error_that_says_who_is_missing() -> None:
    town = Town()
    a, b = town.peer("a", alive_s=1e9), town.peer("b", alive_s=1e9)
    b.beat(0)
    a.post(0, of(1.0))
    with pytest.raises(
        HangError, match=r"round 0 of the mailbox .* 1 letters have come \(a\), and those of b have not"
    ):
        a.collect(0, patience_s=50.0)
    with pytest.raises(HangError, match="of a quorum of 3"):
        a.collect(0, quorum=3, patience_s=5.0)


def test_two_processes_of_one_name_are_told() -> None:
    town = Town()
    first = town.peer("a")
    first.beat(0)
    town.peer("a").beat(0)  # it was started anew, while the first one still runs
    with pytest.raises(UsageError, match="another process has become peer a") as caught:
        first.beat(1)
    assert caught.value.code == "L05"
    with pytest.raises(UsageError, match="names no peer"):
        town.peer("../a")


def test_a_heartbeat_that_is_being_written_is_that_of_before() -> None:
    town = Town()
    a, b = town.peer("a"), town.peer("b")
    b.beat(4)
    assert names_of(a) == ["b"]
    town.depot.write("peers/b.json", sealed({"session": "x", "beat": 2, "round": 5})[:-9])
    assert names_of(a) == ["b"]
    town.time.now = 100.0
    assert names_of(a) == []


def names_of(box: Mailbox) -> list[str]:
    return [peer.name for peer in box.peers()]


def trained(url: str, peer: str, rounds: int, quorum: int) -> str:
    """Rounds of one peer, whose deltas depend on all weights so far; a digest of the weights at the end."""
    box = open_mailbox(url, peer, alive_s=50.0)
    x = torch.zeros(1000)
    for round in range(rounds):
        delta = torch.sin(x + ord(peer[0]) + torch.arange(1000.0))
        box.post(round, {"x": delta}, weight=ord(peer[0]))
        letters = box.collect(round, quorum=quorum, patience_s=50.0)
        x = x + mean(letters)["x"]
        box.publish(round + 1, {"x": x})
    return sha256(x.numpy().tobytes()).hexdigest()


def test_peers_as_threads_compute_the_same_bits() -> None:
    url, digests = f"memory://{uuid4().hex}", dict[str, str]()

    def live(peer: str) -> None:
        digests[peer] = trained(url, peer, 3, 3)

    threads = [threading.Thread(target=live, args=(peer,)) for peer in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(digests) == ["a", "b", "c"] and len({*digests.values()}) == 1


def test_peers_as_processes_compute_the_same_bits(tmp_path: Path) -> None:
    url, children = f"file://{tmp_path}/box", list[int]()
    for peer in "ab":
        if not (child := os.fork()):
            try:
                (tmp_path / peer).write_text(trained(url, peer, 3, 2))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    digest = (tmp_path / "a").read_text()
    assert digest == (tmp_path / "b").read_text() != ""
