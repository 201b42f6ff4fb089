"""One thread that carries the messages of a worker: it hears callers, sends, receives, and notices who has gone."""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.launch.host_listener import HostListener
from unisono.launch.link import Broken, HostLink, Refused
from unisono_contrib.rpc.messages import Message, MessageReader, frames_of

_BEATS = 4  # in the silence after which a peer counts as gone
_FLUSH = 5.0  # seconds at the end, for what is still to be sent


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker: its name, its number among all workers, and its host. life: of this process, new at each start."""

    name: str
    rank: int
    host: str
    life: str = field(default="", repr=False)

    @classmethod
    def read(cls, facts: dict[str, Any]) -> "WorkerInfo":
        """What `as_json` wrote. Raises Refused."""
        match facts:
            case {"name": str(name), "rank": int(rank), "host": str(host), "life": str(life)}:
                return cls(name, rank, host, life)
        raise Refused("who called does not say which worker it is")

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "rank": self.rank, "host": self.host, "life": self.life}


@dataclass(eq=False)
class Connection:
    """A link to another worker. calls: whether this side has opened it, and asks over it. ended: why it has ended, ""
    while it lives. Only the switchboard's thread touches the link."""

    link: HostLink = field(repr=False)
    peer: WorkerInfo
    calls: bool
    ended: str = ""
    outbox: deque[bytes] = field(default_factory=deque, repr=False)
    reader: MessageReader = field(default_factory=MessageReader, repr=False)
    beat: float = field(default_factory=time.monotonic)


class _PeerListener(HostListener):
    """The port of a worker, behind which nothing happens without the run's token."""

    def _member(self, facts: dict[str, Any], host_link: HostLink, address: str) -> Connection:
        return Connection(host_link, WorkerInfo.read(facts), calls=False)


class Switchboard:
    """heard(connection, message): a message has come. ended(connection): it is over. due(): acts on what is late, and
    returns when it wants to be called again, by the monotonic clock. All three run on the switchboard's thread and must
    not wait. silence: seconds, after which a peer that says nothing has gone.
    """

    def __init__(
        self,
        listener: HostListener,
        silence: float,
        heard: Callable[[Connection, Message], None],
        ended: Callable[[Connection], None],
        due: Callable[[], float],
    ) -> None:
        self._listener, self._silence = listener, silence
        self._heard, self._ended, self._due = heard, ended, due
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._news: deque[tuple[Connection, Sequence[bytes]]] = deque()
        self._open: list[Connection] = []
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._live, name="remote calls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, connection: Connection, frames: Sequence[bytes] = ()) -> None:
        """Send a message, from any thread, without waiting; a new connection is carried from now on."""
        self._news.append((connection, frames))
        self.ring()

    def ring(self) -> None:
        """Have the thread look at what is new."""
        with contextlib.suppress(OSError):  # full: it will look; closed: it is over
            self._bell.send(b"!")

    def stop(self) -> None:
        """Send what is still to be sent, close all links, end the thread."""
        self._stops.set()
        self.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _FLUSH)

    def _live(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self._selector.register(self._ear, selectors.EVENT_READ, self._ear)
        until = None
        try:
            while until is None or (time.monotonic() < until and any(map(_owes, self._open))):
                self._turn(until)
                if until is None and self._stops.is_set():
                    until = time.monotonic() + _FLUSH
        finally:
            for connection in list(self._open):
                self._end(connection, "this worker has left")
            self._listener.close()
            self._selector.close()
            self._bell.close()
            self._ear.close()

    def _turn(self, until: float | None) -> None:
        now = time.monotonic()
        wanted = [self._due(), now + self._silence / _BEATS, self._listener.next_deadline() or now + 60.0]
        wanted += [until] if until is not None else []
        for key, events in self._selector.select(max(0.0, min(wanted) - now)):
            if key.data is self._ear:
                with contextlib.suppress(BlockingIOError):
                    self._ear.recv(4096)
            elif key.data is self._listener:
                for connection in self._listener.turn():
                    self._watch(connection)
            elif events & selectors.EVENT_READ:
                self._receive(key.data)
        self._listener.expire()
        self._take_news()
        self._beat()
        for connection in list(self._open):
            self._pump(connection)

    def _take_news(self) -> None:
        while self._news:
            connection, frames = self._news.popleft()
            if connection.ended:
                continue
            if connection not in self._open:
                self._watch(connection)
            connection.outbox.extend(frames)

    def _watch(self, connection: Connection) -> None:
        self._open.append(connection)
        self._selector.register(connection.link.sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: Connection) -> None:
        try:
            for frame in connection.link.receive():
                message = connection.reader.feed(frame)
                if message is not None and message[0]:
                    self._heard(connection, message)
        except Broken as error:
            self._end(connection, str(error))
        except (ValueError, TypeError, KeyError) as error:
            self._end(connection, f"what it sent is no message: {error}")

    def _pump(self, connection: Connection) -> None:
        """Send as much as the link takes now."""
        link, outbox = connection.link, connection.outbox
        try:
            owes = link.pay()
            while outbox and not owes:
                link.send(outbox.popleft())
                owes = link.pay()
        except Broken as error:
            self._end(connection, str(error))
            return
        write = selectors.EVENT_WRITE if _owes(connection) else 0
        self._selector.modify(link.sock, selectors.EVENT_READ | write, connection)

    def _beat(self) -> None:
        """Say that this worker lives, and look who does not say so."""
        now = time.monotonic()
        for connection in list(self._open):
            if now - connection.link.heard > self._silence:
                self._end(connection, f"silent for {self._silence:g} s")
            elif now - connection.beat > self._silence / _BEATS and not connection.outbox:
                connection.beat = now
                connection.outbox.extend(frames_of({}))

    def _end(self, connection: Connection, why: str) -> None:
        if connection.ended:
            return
        connection.ended = why
        self._open.remove(connection)
        self._selector.unregister(connection.link.sock)
        connection.link.close()
        self._ended(connection)


def _owes(connection: Connection) -> bool:
    return bool(connection.outbox or connection.link.owed)
