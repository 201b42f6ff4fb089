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
from unisono.launch.stand import Stand, from_dump, process_state

# Gloo announces every group on standard output; a user does not need that.
_CHATTER = ("[Gloo] Rank ",)


@dataclass
class Seat:
    """heard: when its last event came, in seconds of a monotonic clock. status: exit status (negative: signal), None
    while it lives."""

    rank: int
    store: socket.socket
    events: socket.socket
    output: int
    heard: float
    store_frames: wire.Frames = field(default_factory=wire.Frames)
    event_frames: wire.Frames = field(default_factory=wire.Frames)
    pid: int | None = None
    pidfd: int | None = None
    finished: bool = False
    result: dict[str, Any] | None = None
    error: Record | None = None
    status: int | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
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
        if self.pidfd is not None and self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def stands(self, host: str) -> Stand:
        """What it wrote when it was asked where it stands; where it wrote nothing, what the kernel says."""
        seen = from_dump(self.rank, list(self.lines), host=host)
        stopped = seen.state == "silent" and process_state(self.pid or 0) in ("T", "t")
        return Stand(self.rank, "stopped", host) if stopped else seen

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
        return self.pid is not None and self.status is None and process_state(self.pid) == "T"

    def close(self) -> None:
        self.store.close()
        self.events.close()
        os.close(self.output)
        if self.pidfd is not None:
            os.close(self.pidfd)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def seat_pair(rank: int, now: float) -> tuple[Seat, list[int]]:
    """A seat, and the file descriptors of the rank's own ends: store, events, output."""
    store_ours, store_theirs = socket.socketpair()
    events_ours, events_theirs = socket.socketpair()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    seat = Seat(rank, store_ours, events_ours, reads, now)
    return seat, [store_theirs.detach(), events_theirs.detach(), writes]
