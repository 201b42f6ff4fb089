"""A host behind a slow link is there as long as bytes come from it, and its rate is measured without filling the link."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.test_link import linked
from unisono.launch import link as links
from unisono.launch import remote_host, wire
from unisono.launch.agent import Agent
from unisono.launch.link import Broken, HostLink
from unisono.launch.local_host import LocalHost
from unisono.launch.remote_host import PIECE, LinkProbe, RemoteHost
from unisono.launch.stream_mux import StreamMux

pytestmark = pytest.mark.timeout(60)


@given(st.floats(1e5, 1e9), st.floats(1e-5, 0.05))
def test_a_probe_finds_rate_and_delay_and_ends_soon(rate: float, delay: float) -> None:
    """On a link that takes `delay` each way and carries `rate` bit/s."""
    probe, now, sent = LinkProbe(), 0.0, 0
    asked = probe.begin(now)
    while asked:
        start, asked_next = now, list[int]()
        for nbytes in asked:
            start += 8 * nbytes / rate
            sent += nbytes
            now = start + 2 * delay
            asked_next += probe.answered(probe.number, now)
        asked = asked_next
    assert probe.rate == pytest.approx(rate, rel=0.05)
    assert probe.delay == pytest.approx(delay, rel=0.05, abs=8 / rate)
    assert now < 4 * remote_host._LONG + 16 * delay + 8 * PIECE / rate
    assert sent < 32 * PIECE


def test_an_answer_to_an_older_probe_is_none() -> None:
    probe = LinkProbe()
    probe.begin(0.0)
    assert probe.begin(1.0) == [1] and probe.answered(1, 1.1) == [] and probe.answered(2, 1.1) == [1]


def _slim(sock: socket.socket) -> None:
    """Little lies in its buffer, in small packets."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)


@contextlib.contextmanager
def throttled(rate: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a link that carries `rate` bytes a second each way, and as much as it carries in 10 ms at once."""
    server = socket.create_server(("127.0.0.1", 0))
    _slim(server)
    ends, inner = list[socket.socket](), list[socket.socket]()
    for _ in range(2):
        end = socket.socket()
        _slim(end)
        end.connect(server.getsockname())
        ends.append(end)
        inner.append(server.accept()[0])
    over, piece = threading.Event(), max(1, int(rate / 100))

    def carry(source: socket.socket, target: socket.socket) -> None:
        due = 0.0
        with contextlib.suppress(OSError):
            while not over.is_set() and (data := source.recv(piece)):
                target.sendall(data)
                due = max(due, time.monotonic() - 0.05) + len(data) / rate
                over.wait(due - time.monotonic())

    threads = [threading.Thread(target=carry, args=pair) for pair in (inner, reversed(inner))]
    for thread in threads:
        thread.start()
    yield ends[0], ends[1]
    over.set()
    for sock in (*ends, *inner, server):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    for thread in threads:
        thread.join(10)


class Serving:
    """An agent that has just been admitted, without a helper, in a thread."""

    def __init__(self, sock: socket.socket, silent: float) -> None:
        self.agent, self.why = Agent(dict, "b", 1, "", say=lambda text: None), ""
        self.agent._silent = silent
        self.ends = socket.socketpair(), socket.socketpair()
        server = SimpleNamespace(kill=lambda: None, wait=lambda: 0)
        self.agent._host = LocalHost("b", 1, 1, self.ends[0][0], server)  # pyright: ignore
        self.agent._signals = self.ends[1][0]  # pyright: ignore
        mux = StreamMux(HostLink.between(sock, "t", "n", "m", is_caller=True))
        self.thread = threading.Thread(target=self._serve, args=(mux,))
        self.thread.start()

    def _serve(self, mux: StreamMux) -> None:
        try:
            self.agent._serve(mux)
        except (Broken, OSError) as error:
            self.why = str(error)
        mux.close()
        for pair in self.ends:
            for end in pair:
                end.close()


def turned(host: RemoteHost, seconds: float) -> float:
    """Seconds for which the host was there, at most so many."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if {"op": "gone"} in host.poll():
            break
        host.mux._selector.select(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("rate", [125_000, 1_250_000])
def test_a_host_behind_a_slow_link_stays_and_is_measured(rate: float) -> None:
    """1 and 10 Mbit/s, where a message alone takes longer than the silence after which either side is given up."""
    with throttled(rate) as (ours, theirs):
        host = RemoteHost("b", 1, 1, HostLink.between(ours, "t", "n", "m", is_caller=False), gone=0.4)
        serving = Serving(theirs, 0.4)
        host.send({"op": "odd", "data": "x" * int(rate)})  # a second of it
        host.send({"op": "probe"})
        assert turned(host, 2.5) >= 2.5, serving.why
        assert host.rate == pytest.approx(8 * rate, rel=0.35)
        host.close()
        serving.thread.join(10)
        assert not serving.thread.is_alive()


def test_a_host_that_says_nothing_is_gone_whatever_is_said_to_it() -> None:
    """What ranks here write into its mux is no sign of its life."""
    near, far, _ = linked()
    host = RemoteHost("b", 1, 1, near, gone=0.3)
    ours, theirs = socket.socketpair()
    host.mux.carry(7, theirs.detach())
    while {"op": "gone"} not in host.poll() and time.monotonic() - near.heard < 5:
        ours.send(b"x")
    now = time.monotonic()
    assert 0.3 <= now - near.heard < 5
    host.close()
    far.close()
    ours.close()


def test_many_small_frames_are_cut_in_time_that_grows_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far, raw = linked()
    for _ in range(40_000):
        near.owed += wire.frame(links._hash(near.seals, near._sent, b"x" * 60) + b"x" * 60)
        near._sent += 1
    frames, near.owed = bytes(near.owed), bytearray()
    began = time.thread_time()
    assert len([far._opened(frame) for frame in far._in.feed(frames)]) == 40_000
    assert time.thread_time() - began < 2.0
    near.close()
    far.close()
    raw.close()


def test_who_sends_without_end_is_heard_in_between() -> None:
    """A turn takes in some, not all that comes: the supervisor has other hosts too."""
    near, far, _ = linked()
    stop = threading.Event()
    near.sock.setblocking(True)

    def send() -> None:
        frame = os.urandom(1 << 20)
        with contextlib.suppress(Broken, OSError):
            while not stop.is_set():
                near.send(frame)

    thread = threading.Thread(target=send)
    thread.start()
    until = time.monotonic() + 20
    got = 0
    while got < 64 and time.monotonic() < until:
        frames = far.receive()
        assert sum(map(len, frames)) <= links.AT_ONCE + (2 << 20)
        got += len(frames)
    stop.set()
    far.close()
    thread.join(10)
    near.close()
    assert got >= 64
