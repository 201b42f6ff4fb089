"""Lines of workers, carried over one link between two hosts: what is written at one end comes out at the other. No
torch.

A frame is either a message between the supervisors, as JSON, or some bytes of a stream; none of them end it.
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

_STREAM = struct.Struct("<cI")
_PIECE = 1 << 16


@dataclass
class _Stream:
    """An end of a stream: an open file that never blocks. reads, writes: which ways it still goes. owed: what came for
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


class StreamMux:
    """All streams of a link. `fileno` can be read when `turn` has something to do."""

    def __init__(self, link: HostLink) -> None:
        self.link = link
        self._streams: dict[int, _Stream] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(link.sock, selectors.EVENT_READ)
        self._congested = False

    def fileno(self) -> int:
        return self._selector.fileno()

    def carry(self, number: int, file: int, reads: bool = True, writes: bool = True) -> None:
        """An end of a stream, from now on: the file is ours. reads: what is read there goes to the other side."""
        os.set_blocking(file, False)
        self._streams[number] = stream = _Stream(number, file, reads, writes)
        self._await(stream)

    def say(self, message: dict[str, Any]) -> None:
        """To the other supervisor. Raises Broken."""
        self.link.send(b"m" + json.dumps(message, separators=(",", ":")).encode())
        self._mind_the_link()

    def turn(self) -> list[dict[str, Any]]:
        """Carry what there is, without waiting; messages that have come. Raises Broken."""
        messages = list[dict[str, Any]]()
        for key, events in self._selector.select(0):
            if key.fileobj is self.link.sock:
                if events & selectors.EVENT_WRITE:
                    self.link.pay()
                if events & selectors.EVENT_READ:
                    messages += filter(None, map(self._take, self.link.receive()))
            elif (stream := self._streams.get(key.data)) is not None:
                if events & selectors.EVENT_WRITE:
                    self._write(stream)
                if events & selectors.EVENT_READ:
                    self._read(stream)
        self._mind_the_link()
        return messages

    def drain(self, number: int) -> None:
        """Send all that still lies in a stream whose rank is gone. Raises Broken."""
        stream = self._streams.get(number)
        while stream is not None and stream.reads and self._read(stream):
            pass

    def owes(self, number: int) -> bool:
        """Whether some of what came for a stream was not taken yet, since the file was full."""
        stream = self._streams.get(number)
        return stream is not None and bool(stream.owed)

    def close(self) -> None:
        for stream in list(self._streams.values()):
            self._end(stream)
        self._selector.close()
        self.link.close()

    def _take(self, frame: bytes) -> dict[str, Any] | None:
        """A message; bytes of a stream go their way. Raises Broken."""
        if frame[:1] == b"m":
            try:
                message = json.loads(frame[1:])
            except (ValueError, RecursionError) as error:
                raise Broken("a message that is none") from error
            return message if isinstance(message, dict) else None
        if len(frame) < _STREAM.size:
            raise Broken("a frame of no stream")
        _, number = _STREAM.unpack_from(frame)
        if (stream := self._streams.get(number)) is not None:
            data = frame[_STREAM.size :]
            stream.owed += data
            stream.ends = stream.ends or not data
            self._write(stream)
        return None

    def _read(self, stream: _Stream) -> bool:
        """Send a piece of what lies in a file; False when nothing does."""
        try:
            data = os.read(stream.file, _PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.link.send(_STREAM.pack(b"d", stream.number) + data)
        if not data:
            stream.reads = False
            self._await(stream)
        return bool(data)

    def _write(self, stream: _Stream) -> None:
        try:
            while stream.owed and stream.writes:
                del stream.owed[: os.write(stream.file, stream.owed)]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                raise
            stream.writes = False
            stream.owed.clear()
        if stream.ends and stream.writes and not stream.owed:
            stream.writes = False
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.file)) as sock:
                sock.shutdown(socket.SHUT_WR)  # a pipe has no other way, and is closed
        self._await(stream)

    def _await(self, stream: _Stream) -> None:
        """Look for what the stream still has to do; one that has nothing is over."""
        if not stream.reads and not stream.writes:
            self._end(stream)
            return
        events = stream.events(self._congested)
        known = stream.file in self._selector.get_map()
        if events and known:
            self._selector.modify(stream.file, events, stream.number)
        elif events:
            self._selector.register(stream.file, events, stream.number)
        elif known:
            self._selector.unregister(stream.file)

    def _end(self, stream: _Stream) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stream.file)
        if self._streams.pop(stream.number, None) is not None:
            os.close(stream.file)

    def _mind_the_link(self) -> None:
        """Whoever writes waits while the link has too much to carry."""
        waits = bool(self.link.owed)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
        self._selector.modify(self.link.sock, events)
        if (congested := len(self.link.owed) > BACKLOG) != self._congested:
            self._congested = congested
            for stream in list(self._streams.values()):
                self._await(stream)
