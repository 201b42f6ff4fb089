"""What supervisor, helper and ranks tell each other arrives whole, however long it is and however late it is read."""

import os
import socket
from typing import Any

import pytest

from unisono.launch import wire
from unisono.launch.fork_server import ForkServer
from unisono.launch.local_host import LocalHost
from unisono.launch.loop import EventLoop
from unisono.launch.pace import StepPace
from unisono.launch.run.membership import RunSpread
from unisono.launch.run.state import RunTerms, begin
from unisono.spec.errors import UsageError


def prepare(argument: dict[str, Any]) -> None:
    if argument["words"]:
        raise UsageError("ü" * argument["words"], where="w" * argument["words"], code="C02")


def entry(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    return {"length": len(argument["text"])}


@pytest.mark.parametrize("size", [1, wire.ROOM - 12, wire.ROOM, 1 << 16, 3 << 20])
def test_messages_of_any_length_carry_their_files(size: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket() as attached:
        wire.send_message(ours, {"text": "x" * size}, [attached.fileno()])
        wire.send_message(ours, {"text": "next"})
        got = wire.read_message(theirs)
        assert got is not None and got[0] == {"text": "x" * size} and len(got[1]) == 1
        socket.socket(fileno=got[1][0]).close()
        assert wire.read_message(theirs) == ({"text": "next"}, [])
        ours.close()
        assert wire.read_message(theirs) is None


def test_a_long_error_before_the_fork_is_told_and_a_long_argument_arrives() -> None:
    with ForkServer("tests.launch.test_wire:entry", path=["."]) as nursery:
        outcome = nursery.run({"words": 100_000, "text": ""}, 1)
        assert outcome.exit == 2 and outcome.error is not None and outcome.error.what == "ü" * 100_000
        outcome = nursery.run({"words": 0, "text": "x" * (1 << 20)}, 2)
        assert outcome.results == [{"length": 1 << 20}] * 2


def watched() -> tuple[EventLoop, socket.socket, list[int]]:
    """A loop of one worker, the fork server's end of its line, and the worker's ends of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host = LocalHost("h", 1, 1, ours, server=None)  # type: ignore[arg-type]
    state = begin(RunTerms("h", RunSpread("", 1)))
    loop = EventLoop(state, lambda rank, event: None, StepPace(None), {}, {}, host, lambda: host)
    loop._join(0, host)
    assert wire.read_message(theirs) is not None  # prepare
    spawn = wire.read_message(theirs)
    assert spawn is not None and spawn[0]["op"] == "spawn"
    return loop, theirs, spawn[1]


def test_last_words_behind_much_else_are_heard() -> None:
    loop, server, (store, events, output) = watched()
    os.close(output)
    rank = socket.socket(fileno=events)
    said = b"".join(
        wire.frame(wire.dumps({"kind": "step", "step": 1, "text": "x" * 1000})) for _ in range(150)
    )
    rank.sendall(said + wire.frame(wire.dumps({"kind": "error", "error": {"what": "why", "echo": False}})))
    rank.close()
    socket.socket(fileno=store).close()
    wire.send_message(server, {"op": "exit", "worker": 1, "status": 1})
    loop._poll(0, loop.local)
    assert loop.state.error is not None and loop.state.error.what == "why", "not: it left without a word"


def test_a_rank_that_does_not_read_keeps_nobody_waiting() -> None:
    loop, _, theirs = watched()
    answer = b"x" * (8 << 20)
    loop._reply([(1, [b"1", b"+", answer])])
    assert loop.workers[1].to_store, "it returned while the rank had not read"
    rank = socket.socket(fileno=theirs[0])
    rank.settimeout(10)
    got = wire.Frames()
    whole: list[bytes] = []
    while not whole:
        whole = got.feed(rank.recv(1 << 20))
        loop._send_answers(loop.workers[1])
    assert wire.split(whole[0]) == [b"1", b"+", answer] and not loop.workers[1].to_store
    rank.close()


def test_what_somebody_said_is_heard_though_they_left_before_they_heard_us() -> None:
    """A helper that fails while the order is under way: its error must not be lost."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            wire.send_message(ours, {"op": "run"})
            wire.send_message(theirs, {"op": "failed"})
        assert wire.read_message(ours) == ({"op": "failed"}, [])
        assert wire.read_message(ours) is None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            wire.send_message(ours, {"op": "run"})
        assert wire.read_message(ours) is None
