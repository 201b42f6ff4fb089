"""Between hosts nobody gets in without the token, and no frame is taken that the other side did not send, once, in its
turn."""

import contextlib
import errno
import json
import os
import select
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.launch import agent, link, wire
from unisono.launch.host_listener import HostListener
from unisono.launch.link import Broken, HostLink, Refused
from unisono.launch.remote_host import RemoteHost, stream_of
from unisono.launch.stream_mux import StreamMux
from unisono.launch.worker_handle import line_pairs

pytestmark = pytest.mark.timeout(60)
HOST = {"name": "b", "room": 2, "cores": 4}


def linked(token: str = "t") -> tuple[HostLink, HostLink, socket.socket]:
    """Two ends of a link, and the wire of the first."""
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    called, _ = ours.accept()
    ours.close()
    return (
        HostLink.between(called, token, "n", "m", False),
        HostLink.between(theirs, token, "n", "m", True),
        called,
    )


def all_of(end: HostLink, count: int) -> list[bytes]:
    found, until = list[bytes](), time.monotonic() + 10
    while len(found) < count and time.monotonic() < until:
        found += end.receive()
    return found


@given(st.lists(st.binary(max_size=3000), min_size=1, max_size=8))
def test_frames_arrive_as_they_were_sent_both_ways(said: list[bytes]) -> None:
    one, other, _ = linked()
    for end, far in ((one, other), (other, one)):
        for payload in said:
            end.send(payload)
        assert all_of(far, len(said)) == said
    one.close()
    other.close()


def sent(payload: bytes) -> bytes:
    """What goes over the wire for the first frame of a link."""
    one, other, _ = linked()
    one.send(payload)
    time.sleep(0)
    data = b""
    while len(data) < wire.HEAD.size + 16 + len(payload):
        try:
            data += other.sock.recv(1 << 16)
        except BlockingIOError:
            continue
    one.close()
    other.close()
    return data


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_frame_that_is_changed_left_out_or_sent_again_ends_the_link(payload: bytes, data: Any) -> None:
    frame = bytearray(sent(payload))
    how = data.draw(st.sampled_from(["changed", "again", "later", "longer", "other way"]))
    one, other, raw = linked()
    raw.setblocking(True)
    if how == "changed":
        at = data.draw(st.integers(wire.HEAD.size, len(frame) - 1))
        frame[at] ^= 1 << data.draw(st.integers(0, 7))
        raw.sendall(frame)
    elif how == "again":
        raw.sendall(frame + frame)
    elif how == "later":  # one before it is missing
        other._got = 1
        raw.sendall(frame)
    elif how == "longer":
        raw.sendall(wire.HEAD.pack(link.MOST + 1) + bytes(100))
    else:
        raw.setblocking(False)
        other, raw = one, other.sock
        raw.sendall(frame)
    with pytest.raises(Broken):
        all_of(other, 2)
        all_of(other, 2)
    one.close()
    raw.close()


def received(listener: HostListener, seconds: float = 5.0) -> list[RemoteHost]:
    """Who has got in."""
    until, found = time.monotonic() + seconds, list[RemoteHost]()
    while not found and time.monotonic() < until:
        found += listener.turn()
        listener.expire()
    return found


def calling(listener: HostListener, token: str) -> list[Any]:
    """What comes of a call with a token: a link or an error, in a list."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(agent.call({**listener.door, "token": token}, HOST))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    hosts = received(listener, 1.0 if token != listener.token else 10.0)
    thread.join(10)
    return [*result, *hosts]


@pytest.mark.parametrize("private", [False, True])
def test_who_knows_the_token_gets_in_and_nobody_else(private: bool) -> None:
    said: list[str] = []
    listener = HostListener.at("127.0.0.1", private)
    listener.refused = said.append
    made, host = calling(listener, listener.token)
    assert isinstance(made, HostLink) and (host.name, host.room, host.cores) == ("b", 2, 4)
    (error,) = calling(listener, "f" * 64)
    assert isinstance(error, Refused) and "token" in str(error)
    assert said and "stranger" in said[0] and listener.token not in said[0]
    host.close()
    made.close()
    listener.close()


def test_over_tls_whatever_is_written_arrives_and_another_certificate_is_refused() -> None:
    listener = HostListener.at("127.0.0.1", private=True)
    made, host = calling(listener, listener.token)
    sent = os.urandom(3 << 20)
    got, until = b"", time.monotonic() + 20
    made.send(b"d" + bytes(4) + sent)
    while len(got) < len(sent) and time.monotonic() < until:
        made.pay()
        got += b"".join(frame[5:] for frame in host.link.receive())
    assert got == sent
    thread = threading.Thread(target=received, args=(listener, 1.0))
    thread.start()
    with pytest.raises(ConnectionError, match="certificate"):
        agent.call({**listener.door, "certificate": "0" * 64}, HOST)
    thread.join()
    host.close()
    made.close()
    listener.close()


def test_a_caller_refuses_who_does_not_know_the_token() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(wire.frame(wire.dumps(link.challenge())))
            wire.read_frame(sock)
            sock.sendall(wire.frame(wire.dumps({"proof": "0" * 64})))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(Refused):
        agent.call({"address": "127.0.0.1", "port": server.getsockname()[1], "token": "t"}, HOST)
    thread.join(10)
    server.close()


def test_an_answer_that_was_heard_before_opens_nothing() -> None:
    """Each call is asked another number."""
    asked = link.challenge()
    answered = link.answer("t", asked, HOST)
    assert link.admitted("t", asked, answered)[0] == HOST
    with pytest.raises(Refused):
        link.admitted("t", link.challenge(), answered)
    with pytest.raises(Refused):
        link.admitted("t", asked, {**answered, "room": 64})


@given(st.binary(min_size=1, max_size=6000))
def test_random_bytes_get_nowhere_and_keep_nobody_out(data: bytes) -> None:
    listener = HostListener.at("127.0.0.1")
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(data)
        assert not received(listener, 0.02)
    listener.close()


@pytest.mark.parametrize(
    "said", [b"[]", b"null", b"[" * 3000, b'{"nonce": 3}', b'{"nonce": "x", "proof": null}', b"\xff"]
)
def test_a_greeting_of_nonsense_is_refused(said: bytes) -> None:
    listener = HostListener.at("127.0.0.1")
    heard: list[str] = []
    listener.refused = heard.append
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(wire.frame(said))
        assert not received(listener, 0.2)
    assert heard
    listener.close()


def test_who_holds_the_line_is_shown_out_and_others_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.2)
    listener = HostListener.at("127.0.0.1")
    held = list[socket.socket]()
    for _ in range(80):
        held.append(socket.create_connection(("127.0.0.1", listener.port)))
        listener.turn()
    assert not received(listener, 0.5)
    made, host = calling(listener, listener.token)
    assert isinstance(made, HostLink)
    host.close()
    for sock in held:
        sock.close()
    listener.close()


def test_the_door_is_for_the_owner_alone(tmp_path: Any) -> None:
    listener = HostListener.at("127.0.0.1")
    mask = os.umask(0)
    try:
        listener.write_door(tmp_path)
    finally:
        os.umask(mask)
    path = tmp_path / "door.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == listener.door
    listener.close()


@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=200_000)), max_size=6))
def test_lanes_carry_whatever_is_written(pieces: list[tuple[bool, bytes]]) -> None:
    one, other, _ = linked()
    near, far = StreamMux(one), StreamMux(other)
    ours, ours_end = socket.socketpair()
    theirs, theirs_end = socket.socketpair()
    near.carry(7, ours_end.detach())
    far.carry(7, theirs_end.detach())
    got, due = {True: b"", False: b""}, {True: b"", False: b""}
    for way, data in pieces:
        due[way] += data
    ends = {True: (ours, theirs), False: (theirs, ours)}
    left = dict(due)
    for sock in (ours, theirs):
        sock.setblocking(False)
    until = time.monotonic() + 20
    while got != due and time.monotonic() < until:
        for way, (source, target) in ends.items():
            try:
                left[way] = left[way][source.send(left[way]) :] if left[way] else b""
            except BlockingIOError:
                pass
            near.turn()
            far.turn()
            try:
                got[way] += target.recv(1 << 20)
            except BlockingIOError:
                pass
    assert got == due
    ours.close()
    while theirs.fileno() >= 0 and time.monotonic() < until:
        near.turn()
        far.turn()
        try:
            assert theirs.recv(16) == b"", "it ends there too"
            break
        except BlockingIOError:
            continue
    theirs.close()
    near.close()
    far.close()


def test_the_end_of_a_worker_comes_after_all_that_it_printed() -> None:
    """More than a pipe holds, and the end in the same breath: who hears of the end closes the pipe."""
    one, other, _ = linked()
    agent_side, host, (ours, theirs) = StreamMux(one), RemoteHost("b", 1, 1, other), line_pairs()
    printed, worker_end = socket.socketpair()
    agent_side.carry(stream_of(4, 2), printed.detach(), writes=False)
    host.send({"op": "spawn", "worker": 4}, theirs)
    for file in theirs:
        os.close(file)
    for _ in range(6):
        worker_end.sendall(b"x" * 50_000)
        agent_side.drain(stream_of(4, 2))
    agent_side.say({"op": "exit", "worker": 4})
    reports, got, until = list[Any](), 0, time.monotonic() + 20
    while not reports and time.monotonic() < until:
        agent_side.turn()
        if reports := host.poll():
            break
        with contextlib.suppress(BlockingIOError):
            got += len(os.read(ours[2], 1 << 13))
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(ours[2], 1 << 16):
            got += len(piece)
    assert reports == [{"op": "exit", "worker": 4}] and got == 300_000
    worker_end.close()
    agent_side.close()
    host.close()
    ours[0].close()
    ours[1].close()
    os.close(ours[2])


def test_a_door_for_which_there_is_no_descriptor_waits_and_is_opened_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = HostListener.at("127.0.0.1")
    with contextlib.closing(listener), socket.create_connection(("127.0.0.1", listener.port)) as knocks:
        monkeypatch.setattr(socket.socket, "accept", _full)
        assert select.select([listener], [], [], 20)[0]
        listener.turn()
        assert not select.select([listener], [], [], 0)[0]  # nobody turns in circles
        due = listener.next_deadline()
        assert due is not None and due > time.monotonic()
        monkeypatch.undo()
        monkeypatch.setattr("unisono.launch.host_listener.time.monotonic", lambda: due + 1)
        listener.expire()
        assert select.select([listener], [], [], 20)[0]
        listener.turn()
        assert knocks.recv(1)  # it is greeted


def _full(sock: socket.socket) -> None:
    raise OSError(errno.EMFILE, "too many open files")
