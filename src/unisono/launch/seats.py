"""One rank as its supervisor sees it: its sockets, what it said, what became of it. No torch."""

import contextlib
import os
import signal
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import wire
from unisono.launch.crossing import Record
from unisono.launch.hosts import Process, RankHost
from unisono.launch.stand import Stand, from_dump

# Gloo announces every group on standard output; a user does not need that.
_CHATTER = ("[Gloo] Rank ",)


@dataclass
class Seat:
    """number: of the seat among all of a run. rank: that it has in the present epoch. host, index: where it is, and its
    place there. heard: when its last event came, in seconds of a monotonic clock. status: exit status (negative:
    signal), None while it lives."""

    number: int
    rank: int
    host: RankHost
    index: int
    store: socket.socket
    events: socket.socket
    output: int
    heard: float
    store_frames: wire.Frames = field(default_factory=wire.Frames)
    event_frames: wire.Frames = field(default_factory=wire.Frames)
    process: Process | None = None
    finished: bool = False
    result: dict[str, Any] | None = None
    error: Record | None = None
    status: int | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    paused: int = -1  # the epoch in which it has ended its step, to meet anew
    owed: bytearray = field(default_factory=bytearray)  # answers of the store
    _rest: bytes = b""

    def reported(self) -> bool:
        """True once it has said how it ended."""
        return self.finished or self.error is not None

    def tell(self, kind: str, **fields: Any) -> None:
        """Say something to the rank; one that is gone does not mind."""
        with contextlib.suppress(OSError):
            self.events.send(wire.frame(wire.dumps({"kind": kind, **fields})), socket.MSG_DONTWAIT)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None and self.status is None:
            self.process.kill(number)

    def stands(self) -> Stand:
        """What it wrote when it was asked where it stands; where it wrote nothing, what the kernel says."""
        seen = from_dump(self.rank, list(self.lines), host=self.host.name)
        stopped = seen.state == "silent" and self.process is not None and self.process.is_stopped()
        return Stand(self.rank, "stopped", self.host.name) if stopped else seen

    def hear(self) -> list[dict[str, Any]] | None:
        """Events that the next piece of what has come completes; None when nothing has come."""
        data = _receive(self.events)
        return [wire.event(one) for one in self.event_frames.feed(data)] if data else None

    def asked(self) -> list[list[bytes]]:
        """Store requests that have come."""
        return [wire.split(one) for one in self.store_frames.feed(_receive(self.store))]

    def pay(self) -> bool:
        """Send what is owed, as far as the rank takes it; True while some is left. One that is gone is owed nothing."""
        try:
            while self.owed:
                del self.owed[: self.store.send(self.owed, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return True
        except OSError:
            self.owed.clear()
        return False

    def printed(self, last: bool = False) -> tuple[list[str], bool]:
        """Whole lines of what the rank printed, and whether more may come; with `last`, all that is left."""
        open_, data = True, bytearray(self._rest)
        try:
            while piece := os.read(self.output, 1 << 16):
                data += piece
                if not last:
                    break
            open_ = bool(piece)
        except BlockingIOError:
            pass
        pieces = bytes(data).split(b"\n")
        self._rest = pieces.pop()
        if self._rest and (last or not open_):  # a last line without an end
            pieces.append(self._rest)
            self._rest = b""
        lines = [piece.decode(errors="replace") for piece in pieces]
        lines = [line for line in lines if not line.startswith(_CHATTER)]
        self.lines.extend(lines)
        return lines, open_

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.process is not None and self.status is None and self.process.is_stopped()

    def close(self) -> None:
        self.store.close()
        self.events.close()
        os.close(self.output)
        if self.process is not None:
            self.process.close()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def ends() -> tuple[tuple[socket.socket, socket.socket, int], list[int]]:
    """A seat's own ends of its lines, and the descriptors of the rank's: store, events, output."""
    store_ours, store_theirs = socket.socketpair()
    events_ours, events_theirs = socket.socketpair()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    return (store_ours, events_ours, reads), [store_theirs.detach(), events_theirs.detach(), writes]
