"""One worker's lines, at the supervisor's end: what it says, asks of the store and prints, and what it is told. No
torch."""

import os
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import wire

LONGEST = 1 << 20
"""Bytes after which a line that does not end is shown as one."""
BAR_EVERY = 1.0
"""Seconds between two states of a progress bar that are shown."""
# Gloo announces every group on standard output; a user does not need that.
_CHATTER = ("[Gloo] Rank ",)
_PIECE, _LEFT = 1 << 13, 1 << 20  # bytes of output that are read at once, and after a worker's end


@dataclass
class OutputLines:
    """Cuts what a worker prints, in whatever pieces it comes, into lines.

    A progress bar writes over its own line, by carriage returns: of it now and then the
    state of the time is shown, and at its end the last. What is kept in between has `LONGEST` bytes at most.

        OutputLines().feed(b"one\\n10 %\\r20 %\\r", now=0.0)   # ["one", "20 %"]
    """

    _rest: bytearray = field(default_factory=bytearray)
    _shown: bytes = b""
    _at: float = float("-inf")

    def feed(self, data: bytes, now: float, last: bool = False) -> list[str]:
        """Lines to show, after a piece more. now: seconds of a monotonic clock. last: nothing follows."""
        if not (last or b"\n" in data or b"\r" in data) and len(self._rest) + len(data) <= LONGEST:
            self._rest += data  # what came before is not looked at again
            return []
        *whole, rest = bytes(self._rest + data).split(b"\n")
        lines = list[bytes]()
        for line in whole:
            lines += self._ended(_over(line))
        bar, self._rest = b"\r" in rest, bytearray(_kept(rest))
        if last and self._rest.strip(b"\r"):
            lines += self._ended(_over(bytes(self._rest)))
            self._rest.clear()
        elif bar and now - self._at >= BAR_EVERY and (state := _over(rest)):
            self._at, self._shown = now, state
            lines.append(state)
        while len(self._rest) > LONGEST:
            lines.append(bytes(self._rest[:LONGEST]))
            del self._rest[:LONGEST]
        return [line.decode(errors="replace") for line in lines]

    def _ended(self, line: bytes) -> list[bytes]:
        """The line, but for a state of a bar that was shown as it is."""
        shown, self._shown = self._shown, b""
        return [] if shown and line == shown else [line]


def _over(line: bytes) -> bytes:
    """What a terminal would show of a line in which some is written over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _kept(rest: bytes) -> bytes:
    """Of a line that has not ended, what may still be shown: what was written over is not."""
    state = rest.rstrip(b"\r")
    return state[state.rfind(b"\r") + 1 :] + rest[len(state) :][:1]


@dataclass
class WorkerHandle:
    """number: of the worker among all of a run. lines: the last that it printed."""

    number: int
    store: socket.socket
    events: socket.socket
    output: int
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    to_store: bytearray = field(default_factory=bytearray)  # answers of the store that it has not taken yet
    to_events: bytearray = field(default_factory=bytearray)  # words to it that it has not taken yet
    _store_frames: wire.Frames = field(default_factory=wire.Frames)
    _event_frames: wire.Frames = field(default_factory=wire.Frames)
    _output: OutputLines = field(default_factory=OutputLines)

    def tell(self, kind: str, **fields: Any) -> None:
        """Say something to the worker, now or as soon as it reads; one that is gone does not mind."""
        self.to_events += wire.frame(wire.dumps({"kind": kind, **fields}))
        self.send_words()

    def send_words(self) -> bool:
        """Send what is still to be told, as far as the worker takes it; True while some is left."""
        return _push(self.events, self.to_events)

    def send_answers(self) -> bool:
        """Send the store's answers, as far as the worker takes them; True while some are left."""
        return _push(self.store, self.to_store)

    def read_events(self) -> list[dict[str, Any]] | None:
        """Events that the next piece of what has come completes; None when nothing has come."""
        data = _receive(self.events)
        return [wire.event(frame) for frame in self._event_frames.feed(data)] if data else None

    def read_requests(self) -> list[list[bytes]]:
        """Store requests that have come."""
        return [wire.split(frame) for frame in self._store_frames.feed(_receive(self.store))]

    def read_output(self, last: bool = False) -> tuple[list[str], bool]:
        """Whole lines of what the worker printed, and whether more may come; with `last`, all that is left."""
        is_open, data = True, bytearray()
        try:
            # Little at once, so that one that prints without end keeps nobody else waiting; what a worker that is gone
            # has left is at most what a pipe holds, but another process may write into it.
            while piece := os.read(self.output, _PIECE):
                data += piece
                if not last or len(data) >= _LEFT:
                    break
            is_open = bool(piece)
        except BlockingIOError:
            pass
        fed = self._output.feed(bytes(data), time.monotonic(), last or not is_open)
        lines = [line for line in fed if not line.startswith(_CHATTER)]
        self.lines.extend(lines)
        return lines, is_open

    def close(self) -> None:
        self.store.close()
        self.events.close()
        os.close(self.output)


def _push(sock: socket.socket, data: bytearray) -> bool:
    """Send as much as is taken; True while some is left. One that is gone gets nothing."""
    try:
        while data:
            del data[: sock.send(data, socket.MSG_DONTWAIT)]
    except BlockingIOError:
        return True
    except OSError:
        data.clear()
    return False


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def line_pairs() -> tuple[tuple[socket.socket, socket.socket, int], list[int]]:
    """The supervisor's ends of a worker's lines, and the descriptors of the worker's: store, events, output."""
    store_ours, store_theirs = socket.socketpair()
    events_ours, events_theirs = socket.socketpair()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    return (store_ours, events_ours, reads), [store_theirs.detach(), events_theirs.detach(), writes]
