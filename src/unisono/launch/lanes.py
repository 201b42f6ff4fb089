"""Lines of ranks carried over one link between two hosts: what is written at one end comes out at the other. No torch.

A frame is either a message between the supervisors, as JSON, or some bytes of a lane; none of them end it.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from unisono.launch.link import BACKLOG, Broken, HostLink

_LANE = struct.Struct("<cI")
_PIECE = 1 << 16


@dataclass
class _Lane:
    """An end of a lane: an open file that never blocks. reads, writes: which ways it still goes. owed: what came for
    it and was not taken yet."""

    number: int
    file: int
    reads: bool
    writes: bool
    owed: bytearray = field(default_factory=bytearray)
    ends: bool = False  # nothing more comes for it

    def events(self, congested: bool) -> int:
        read = selectors.EVENT_READ if self.reads and not congested else 0
        return read | (selectors.EVENT_WRITE if self.writes and self.owed else 0)


class Lanes:
    """All lanes of a link. `fileno` can be read when `turn` has something to do."""

    def __init__(self, link: HostLink) -> None:
        self.link = link
        self._lanes: dict[int, _Lane] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(link.sock, selectors.EVENT_READ)
        self._congested = False

    def fileno(self) -> int:
        return self._selector.fileno()

    def carry(self, number: int, file: int, reads: bool = True, writes: bool = True) -> None:
        """An end of a lane, from now on: the file is ours. reads: what is read there goes to the other side."""
        os.set_blocking(file, False)
        self._lanes[number] = lane = _Lane(number, file, reads, writes)
        self._await(lane)

    def say(self, message: dict[str, Any]) -> None:
        """To the other supervisor. Raises Broken."""
        self.link.send(b"m" + json.dumps(message, separators=(",", ":")).encode())
        self._mind_the_link()

    def turn(self) -> list[dict[str, Any]]:
        """Carry what there is, without waiting; messages that have come. Raises Broken."""
        said = list[dict[str, Any]]()
        for key, events in self._selector.select(0):
            if key.fileobj is self.link.sock:
                if events & selectors.EVENT_WRITE:
                    self.link.pay()
                if events & selectors.EVENT_READ:
                    said += filter(None, map(self._take, self.link.receive()))
            elif (lane := self._lanes.get(key.data)) is not None:
                if events & selectors.EVENT_WRITE:
                    self._write(lane)
                if events & selectors.EVENT_READ:
                    self._read(lane)
        self._mind_the_link()
        return said

    def drain(self, number: int) -> None:
        """Send all that still lies in a lane whose rank is gone. Raises Broken."""
        lane = self._lanes.get(number)
        while lane is not None and lane.reads and self._read(lane):
            pass

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            self._end(lane)
        self._selector.close()
        self.link.close()

    def _take(self, frame: bytes) -> dict[str, Any] | None:
        """A message; bytes of a lane go their way. Raises Broken."""
        if frame[:1] == b"m":
            try:
                told = json.loads(frame[1:])
            except (ValueError, RecursionError) as error:
                raise Broken("a message that is none") from error
            return told if isinstance(told, dict) else None
        if len(frame) < _LANE.size:
            raise Broken("a frame of no lane")
        _, number = _LANE.unpack_from(frame)
        if (lane := self._lanes.get(number)) is not None:
            data = frame[_LANE.size :]
            lane.owed += data
            lane.ends = lane.ends or not data
            self._write(lane)
        return None

    def _read(self, lane: _Lane) -> bool:
        """Send a piece of what lies in a file; False when nothing does."""
        try:
            data = os.read(lane.file, _PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.link.send(_LANE.pack(b"d", lane.number) + data)
        if not data:
            lane.reads = False
            self._await(lane)
        return bool(data)

    def _write(self, lane: _Lane) -> None:
        try:
            while lane.owed and lane.writes:
                del lane.owed[: os.write(lane.file, lane.owed)]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                raise
            lane.writes = False
            lane.owed.clear()
        if lane.ends and lane.writes and not lane.owed:
            lane.writes = False
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(lane.file)) as sock:
                sock.shutdown(socket.SHUT_WR)  # a pipe has no other way, and is closed
        self._await(lane)

    def _await(self, lane: _Lane) -> None:
        """Look for what the lane still has to do; one that has nothing is over."""
        if not lane.reads and not lane.writes:
            self._end(lane)
            return
        events = lane.events(self._congested)
        known = lane.file in self._selector.get_map()
        if events and known:
            self._selector.modify(lane.file, events, lane.number)
        elif events:
            self._selector.register(lane.file, events, lane.number)
        elif known:
            self._selector.unregister(lane.file)

    def _end(self, lane: _Lane) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lane.file)
        if self._lanes.pop(lane.number, None) is not None:
            os.close(lane.file)

    def _mind_the_link(self) -> None:
        """Whoever writes waits while the link has too much to carry."""
        waits = bool(self.link.owed)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
        self._selector.modify(self.link.sock, events)
        if (congested := len(self.link.owed) > BACKLOG) != self._congested:
            self._congested = congested
            for lane in list(self._lanes.values()):
                self._await(lane)
