"""The bootstrap store: semantics of torch's own stores, on a clock we move and over a real socket."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from unisono.launch import wire
from unisono.launch.rank.store import SocketStore
from unisono.launch.store import ANEW, LATE, OK, StoreServer

pytestmark = pytest.mark.timeout(60)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 7))
def test_frames_survive_any_cut(payloads: list[bytes], size: int) -> None:
    stream = b"".join(map(wire.frame, payloads))
    frames = wire.Frames()
    got = [one for at in range(0, len(stream), size) for one in frames.feed(stream[at : at + size])]
    assert got == payloads
    assert wire.split(wire.join(payloads)) == payloads


def test_a_stream_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="frame of"):
        wire.Frames().feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ValueError, match="inside a field"):
        wire.split(wire.frame(b"abc")[:-1])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_waits_are_answered_when_the_last_key_comes() -> None:
    server = StoreServer(Clock())
    assert server.handle(0, [b"1", b"wait", b"9", b"a", b"b"]) == []
    assert server.handle(1, [b"1", b"set", b"a", b"x"]) == [(1, [b"1", OK])]
    assert server.handle(1, [b"2", b"set", b"b", b"y"]) == [(1, [b"2", OK]), (0, [b"1", OK])]
    assert server.next_deadline() is None


def test_a_wait_ends_with_its_time_and_only_once() -> None:
    clock = Clock()
    server = StoreServer(clock)
    server.handle(3, [b"7", b"get", b"k", b"5"])
    server.handle(4, [b"8", b"get", b"k", b"50"])
    assert server.next_deadline() == 5.0
    assert server.expire() == []
    clock.now = 6.0
    assert server.expire() == [(3, [b"7", LATE, b"k"])]
    assert server.handle(0, [b"1", b"set", b"k", b"v"]) == [(0, [b"1", OK]), (4, [b"8", OK, b"v"])]
    clock.now = 60.0
    assert server.expire() == []


def test_who_leaves_a_meeting_is_answered_and_nobody_else() -> None:
    server = StoreServer(Clock())
    server.handle(0, [b"1", b"get", b"k", b"9"])
    server.handle(0, [b"2", b"wait", b"9", b"k", b"l"])
    server.handle(1, [b"1", b"get", b"k", b"9"])
    assert server.handle(0, [b"3", b"leave"]) == [(0, [b"1", ANEW]), (0, [b"2", ANEW])]
    assert server.handle(0, [b"4", b"leave"]) == []
    assert server.handle(2, [b"1", b"set", b"k", b"v"]) == [(2, [b"1", OK]), (1, [b"1", OK, b"v"])]


def test_waits_that_are_over_are_forgotten() -> None:
    """Ten thousand that were answered, and as many that were too late, with hours left on their clocks."""
    clock = Clock()
    server = StoreServer(clock)
    for number in range(10_000):
        server.handle(0, [b"w", b"get", b"%d" % number, b"7200"])
        server.handle(1, [b"s", b"set", b"%d" % number, b""])
        server.handle(0, [b"l", b"get", b"late", b"0.001"])
        clock.now += 0.01
        server.expire()
    assert server._waits == {} and len(server._deadlines) < 200


def test_a_rank_that_leaves_a_meeting_waits_for_nothing_said_there(ours: SocketStore) -> None:
    """Neither what it waits for already, in another thread, nor what it asks afterwards; the next meeting's it hears."""
    waits = ThreadPoolExecutor(1).submit(ours.get, "never")
    ours.set("k", "v")
    later = ours.anew("epoch/1/")
    with pytest.raises(dist.DistStoreError, match="meet anew"):
        waits.result(20)
    with pytest.raises(dist.DistStoreError, match="meet anew"):
        ours.get("k")
    later.set("k", "w")
    assert later.get("k") == b"w"


def test_a_wait_of_no_time_is_over_at_once(ours: SocketStore) -> None:
    begun = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="in time"):
        ours.wait(["nobody"], timedelta(0))
    assert time.monotonic() - begun < 10  # the store's own limit is 20


@pytest.fixture
def ours() -> Iterator[SocketStore]:
    """A store whose server runs in a thread."""
    near, far = socket.socketpair()

    def serve() -> None:
        server, frames = StoreServer(), wire.Frames()
        while True:
            due = server.next_deadline()
            near.settimeout(None if due is None else max(0.001, due - server.clock()))
            try:
                data = near.recv(1 << 16)
            except TimeoutError:
                data = None
            if data == b"":
                return
            answers = server.expire()
            for request in frames.feed(data or b""):
                answers += server.handle(0, wire.split(request))
            for _, fields in answers:
                near.sendall(wire.frame(wire.join(fields)))

    thread = threading.Thread(target=serve)
    thread.start()
    yield SocketStore(far, timedelta(seconds=20))
    far.shutdown(socket.SHUT_RDWR)
    thread.join()
    near.close()
    far.close()


@pytest.fixture(params=["ours", "torch"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    """Ours and torch's, so that the expectations are torch's and not only ours."""
    if request.param == "ours":
        return request.getfixturevalue("ours")
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def test_same_semantics_as_torch(store: dist.Store) -> None:
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.add("n", 3) == 3 and store.add("n", -1) == 2 and store.get("n") == b"2"
    assert store.check(["a", "n"]) and not store.check(["a", "nobody"])
    assert store.delete_key("a") and not store.delete_key("a")
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "other", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    assert store.get("c") == b"second"
    store.wait(["c", "n"])
    with pytest.raises(dist.DistStoreError):
        store.wait(["nobody"], timedelta(milliseconds=20))
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(dist.DistStoreError):
        store.get("nobody")


def test_prefixes_and_big_values(ours: SocketStore) -> None:
    inner = dist.PrefixStore("p", ours)
    big = bytes(range(256)) * 4096
    inner.set("k", "v")
    ours.set("big", big)
    assert inner.get("k") == b"v" and ours.get("big") == big
    assert ours.num_keys() == 2


def test_a_waiting_thread_keeps_nobody_from_setting(ours: SocketStore) -> None:
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda i=i: got.append(ours.get(f"k{i}"))) for i in range(4)]
    for thread in threads:
        thread.start()
    for i in reversed(range(4)):
        ours.set(f"k{i}", f"v{i}")
    for thread in threads:
        thread.join()
    assert sorted(got) == [b"v0", b"v1", b"v2", b"v3"]


def test_a_lost_launcher_is_an_error_not_a_hang() -> None:
    near, far = socket.socketpair()
    near.close()
    with pytest.raises(dist.DistStoreError, match="launcher has gone"):
        SocketStore(far).get("k")
    far.close()
