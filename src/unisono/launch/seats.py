"""One rank as its supervisor sees it: its sockets, what it said, what became of it. No torch."""

import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import wire
from unisono.launch.crossing import Record
from unisono.launch.hosts import Process, RankHost
from unisono.launch.printed import OutputLines
from unisono.launch.rank_status import RankStatus, from_dump

# Gloo announces every group on standard output; a user does not need that.
_CHATTER = ("[Gloo] Rank ",)
_PIECE, _LEFT = 1 << 13, 1 << 20  # bytes of output that are read at once, and after a rank's end


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
    untold: bytearray = field(default_factory=bytearray)  # of what was told it
    _output: OutputLines = field(default_factory=OutputLines)

    def reported(self) -> bool:
        """True once it has said how it ended."""
        return self.finished or self.error is not None

    def tell(self, kind: str, **fields: Any) -> None:
        """Say something to the rank, now or as soon as it reads; one that is gone does not mind."""
        self.untold += wire.frame(wire.dumps({"kind": kind, **fields}))
        self.tell_on()

    def tell_on(self) -> bool:
        """Send what is still to be told, as far as the rank takes it; True while some is left."""
        return _push(self.events, self.untold)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None and self.status is None:
            self.process.kill(number)

    def stands(self) -> RankStatus:
        """What it wrote when it was asked where it stands; where it wrote nothing, what the kernel says."""
        seen = from_dump(self.rank, list(self.lines), host=self.host.name)
        stopped = seen.state == "silent" and self.process is not None and self.process.is_stopped()
        return RankStatus(self.rank, "stopped", self.host.name) if stopped else seen

    def hear(self) -> list[dict[str, Any]] | None:
        """Events that the next piece of what has come completes; None when nothing has come."""
        data = _receive(self.events)
        return [wire.event(one) for one in self.event_frames.feed(data)] if data else None

    def asked(self) -> list[list[bytes]]:
        """Store requests that have come."""
        return [wire.split(one) for one in self.store_frames.feed(_receive(self.store))]

    def pay(self) -> bool:
        """Send what is owed, as far as the rank takes it; True while some is left. One that is gone is owed nothing."""
        return _push(self.store, self.owed)

    def printed(self, last: bool = False) -> tuple[list[str], bool]:
        """Whole lines of what the rank printed, and whether more may come; with `last`, all that is left."""
        open_, data = True, bytearray()
        try:
            # Little at once, so that one that prints without end keeps nobody else waiting; what a rank that is gone
            # has left is at most what a pipe holds, but another process may write into it.
            while piece := os.read(self.output, _PIECE):
                data += piece
                if not last or len(data) >= _LEFT:
                    break
            open_ = bool(piece)
        except BlockingIOError:
            pass
        fed = self._output.feed(bytes(data), time.monotonic(), last or not open_)
        lines = [line for line in fed if not line.startswith(_CHATTER)]
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


def _push(sock: socket.socket, owed: bytearray) -> bool:
    """Send what is owed, as far as it is taken; True while some is left. One that is gone is owed nothing."""
    try:
        while owed:
            del owed[: sock.send(owed, socket.MSG_DONTWAIT)]
    except BlockingIOError:
        return True
    except OSError:
        owed.clear()
    return False


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
