"""One worker's lines, at the supervisor's end: what it says, asks of the store and prints, and what it is told. No
torch."""

import os
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import wire
from unisono.launch.printed import OutputLines

# Gloo announces every group on standard output; a user does not need that.
_CHATTER = ("[Gloo] Rank ",)
_PIECE, _LEFT = 1 << 13, 1 << 20  # bytes of output that are read at once, and after a worker's end


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
