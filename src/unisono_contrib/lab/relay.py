"""Cables that take time: `python -m unisono_contrib.lab.relay` takes frames from devices and hands them over later.

The kernel here may lack what holds packets back (netem). So both ends of a cable are TAP devices, whose frames are read
from a file: this process reads each, keeps it for as long as the cable is long, and writes it to the other end.
Packets stay as large as their sender made them, up to 64 KiB, so that a fast link is no more work than a slow one.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from unisono.launch.parent import set_parent_death_signal

_SET_DEVICE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TAP, _PLAIN, _LARGE_PACKETS = 0x0002, 0x1000, 0x4000
_SUMS_AND_SEGMENTS = 1 | 2 | 4  # checksums, segments of TCP over IPv4 and IPv6
_FRAME = 1 << 17  # bytes: more than any packet and its head
_AT_ONCE = 64  # frames of one device before another's turn
_TIMER_SLACK = 29


def open_tap(device: str) -> int:
    """A new TAP device in this thread's network, as the file that its frames come from; it is gone when that is closed.
    Raises OSError."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", device.encode(), _TAP | _PLAIN | _LARGE_PACKETS)
        fcntl.ioctl(file, _SET_DEVICE, request)
        fcntl.ioctl(file, _SET_OFFLOAD, _SUMS_AND_SEGMENTS)
    except OSError:
        os.close(file)
        raise
    return file


@dataclass
class Transit:
    """Frames on their way, in order, each with the moment at which it arrives. hold: seconds."""

    hold: float
    _frames: deque[tuple[float, int, bytes]] = field(default_factory=deque)

    def put(self, now: float, to: int, frame: bytes) -> None:
        self._frames.append((now + self.hold, to, frame))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """(where to, frame) of all that have arrived by now."""
        arrived = []
        while self._frames and self._frames[0][0] <= now:
            _, to, frame = self._frames.popleft()
            arrived.append((to, frame))
        return arrived

    def patience(self, now: float) -> float | None:
        """Seconds until the next arrives; None while there is none."""
        return max(0.0, self._frames[0][0] - now) if self._frames else None


def carry(wires: dict[int, int], transit: Transit) -> None:
    """For ever: what comes from a file goes to the one that `wires` names."""
    clock = time.monotonic
    while True:
        # select, unlike poll, counts in less than milliseconds.
        ready, _, _ = select.select(list(wires), (), (), transit.patience(clock()))
        for file in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    transit.put(clock(), wires[file], os.read(file, _FRAME))
        for to, frame in transit.due(clock()):
            with contextlib.suppress(OSError):  # as on a real cable, what cannot be taken is lost
                os.write(to, frame)


def main() -> None:
    terms = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal(terms["parent"], libc)
    libc.prctl(_TIMER_SLACK, 1000, 0, 0, 0)  # nanoseconds
    wires = {near: other for a, b in terms["wires"] for near, other in ((a, b), (b, a))}
    carry(wires, Transit(terms["hold"]))


if __name__ == "__main__":
    main()
