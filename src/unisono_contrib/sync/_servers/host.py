"""A server's threads on one rank: they hear replicas and other servers, and hand messages to its pure parts.

A thread for each connection reads, and one writes, so that whoever is slow to read keeps nobody waiting. All are
daemons, and end with their connections.
"""

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from unisono_contrib.sync._servers import wire
from unisono_contrib.sync._servers.sequencer import Entry, Sequencer
from unisono_contrib.sync._servers.shard import Reply, Shard

_KEPT = 4096  # entries of the log that a shard keeps for those that have not heard them
_FLUSH = 5.0  # seconds in which a server that ends sends what it has said

Heard = Callable[[dict[str, Any], dict[str, Any], list[Tensor | None]], None]
"""(who says it, what, with which tensors). What is said when a connection ends is {"op": "left"}."""


class Outbox:
    """Sends over a connection in order, on a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection = connection
        self._thread = threading.Thread(target=self._send, name="server sends", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        self._waiting.put(data)

    def close(self) -> None:
        self._waiting.put(None)

    def flush(self) -> None:
        """Close, when all is sent or its time is over."""
        self.close()
        self._thread.join(_FLUSH)

    def _send(self) -> None:
        with suppress(OSError):
            while (data := self._waiting.get()) is not None:
                self._connection.send_bytes(data)


class Listener:
    """Accepts callers that know the key. heard: called by one thread at a time. boxes: of each caller, by what it is
    ("worker" or "shard") and its number."""

    def __init__(self, address: str, key: bytes, heard: Heard) -> None:
        self._socket = socket.create_server((address, 0), backlog=128)
        self.port = self._socket.getsockname()[1]
        self.boxes: dict[tuple[str, int], Outbox] = {}
        self._key, self._heard, self._lock = key, heard, threading.Lock()
        self._open: list[Connection] = []
        self._closed = False
        threading.Thread(target=self._accept, name="server accepts", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._closed:
                sock, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(sock,), name="server hears", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            connection, who = wire.answer(sock, self._key)
            place = str(who["kind"]), int(who["number"])
        except (OSError, EOFError, AuthenticationError, ValueError, KeyError):
            return
        with self._lock:
            self._open.append(connection)
            box = self.boxes[place] = Outbox(connection)
            box.put(wire.packed({"op": "welcome"}))
        try:
            while True:
                said, tensors = wire.unpacked(connection.recv_bytes())
                with self._lock:
                    self._heard(who, said, tensors)
        except (OSError, EOFError):
            pass
        finally:
            box.close()
            with self._lock:
                self.boxes.pop(place, None)
                if not self._closed:
                    self._heard(who, {"op": "left"}, [])
            wire.hang_up(
                connection
            )  # closed with its last user, so that nobody writes to a descriptor of another's

    def close(self) -> None:
        """Hang up on all, and accept nobody more."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for box in [*self.boxes.values()]:
            box.flush()
        for connection in self._open:
            wire.hang_up(connection)


@dataclass(slots=True)
class SequencerHost:
    """A sequencer that hears the replicas' speakers and all shards, and sends its log to the shards. entries: how many
    it has sent; each has its number `n`."""

    sequencer: Sequencer
    address: str
    key: bytes
    listener: Listener = field(init=False)
    entries: int = 0

    def __post_init__(self) -> None:
        self.listener = Listener(self.address, self.key, self._hear)

    def _hear(self, who: dict[str, Any], said: dict[str, Any], tensors: Sequence[Tensor | None]) -> None:
        entries = entries_of(self.sequencer, who, said)
        data = [wire.packed({**entry, "n": self.entries + i}) for i, entry in enumerate(entries)]
        self.entries += len(entries)
        for (kind, _), box in self.listener.boxes.items():
            for each in data if kind == "shard" else ():
                box.put(each)


def entries_of(sequencer: Sequencer, who: dict[str, Any], said: dict[str, Any]) -> list[Entry]:
    """What follows from a message of a replica or a shard. Raises ValueError for what neither says."""
    number, s = who["number"], sequencer
    match who["kind"], said["op"]:
        case "worker", "begin":
            return s.begin(number, said["step"])
        case "worker", "ready":
            return s.ready(number, said["step"])
        case "worker", "announce":
            norm = float("nan") if said["norm"] is None else said["norm"]
            return s.announce(number, said["step"], norm, said["stop"])
        case "worker", "gather":
            return s.gather(number)
        case "worker", "left":
            return s.leave(number)
        case "shard", "filled":
            return s.filled(number)
        case "shard", "have":
            return s.have(number, said["worker"], said["step"])
        case "shard", "square":
            return s.square(number, said["attempt"], said["squared"])
        case "shard", "left":
            return []
        case kind, op:
            raise ValueError(f"{kind} {number} says {op}")


@dataclass(slots=True)
class ShardHost:
    """A shard that hears the replicas' gradients and the sequencer's log. place: which part of the
    parameters it has. copy: 0 for the one that replicas read from; the others say nothing to replicas. sent: bytes that
    have gone to replicas since it began. done: entries of the log that were carried out."""

    shard: Shard
    address: str
    key: bytes
    place: int = 0
    copy: int = 0
    listener: Listener = field(init=False)
    sent: int = 0
    done: int = 0
    _kept: deque[Entry] = field(default_factory=partial(deque, maxlen=_KEPT))
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _log: Outbox | None = None
    _connection: Connection | None = None

    def __post_init__(self) -> None:
        self.listener = Listener(self.address, self.key, self._hear)

    def follow(self, host: str, port: int, key: bytes, number: int) -> None:
        """Carry out the log of the sequencer there, from here on. Raises OSError."""
        self._connection = wire.call(host, port, key, {"kind": "shard", "number": number})
        self._log = Outbox(self._connection)
        threading.Thread(target=self._carry_out, name="server follows", daemon=True).start()

    def _carry_out(self) -> None:
        with suppress(OSError, EOFError):
            while (connection := self._connection) is not None:
                entry, _ = wire.unpacked(connection.recv_bytes())
                with self._lock:
                    if not self._ended:
                        self._say(self._do(entry))
        self.listener.close()  # without a sequencer nothing happens any more, and replicas hear of it

    def _do(self, entry: Entry) -> list[Reply]:
        self.done = entry["n"] + 1
        self._kept.append({name: x for name, x in entry.items() if name != "tally"})
        return self.shard.carry_out(entry)

    def end(self) -> None:
        """Hear nothing any more: the shard stays as it is."""
        with self._lock:
            self._ended = True

    def log(self, since: int) -> list[Entry]:
        """The entries that were carried out from number `since` on, as far as they are kept."""
        return [entry for entry in self._kept if entry["n"] >= since]

    def catch_up(self, entries: Iterable[Entry]) -> None:
        """Carry out what others have heard of the sequencer and this shard has not, after `end`. What these entries
        need is here: the sequencer decides on a gradient when all shards have it."""
        for entry in entries:
            if entry["n"] == self.done:
                self._do(entry)

    def _hear(self, who: dict[str, Any], said: dict[str, Any], tensors: list[Tensor | None]) -> None:
        with self._lock:
            if self._ended:
                return
            if said["op"] == "fill":
                there = [x for x in tensors if x is not None]
                count = len(self.shard.params)
                self._say([self.shard.fill(there[:count], there[count:])])
            elif said["op"] == "push":
                self._say([self.shard.push(who["number"], said["step"], tensors)])

    def _say(self, replies: Sequence[Reply]) -> None:
        known: dict[int, bytes] = {}  # a reply to all is written once
        for reply in replies:
            if self.copy and reply.to >= 0:
                continue
            data = known.get(id(reply.tensors)) if reply.tensors else None
            data = data or wire.packed(reply.said, reply.tensors)
            known[id(reply.tensors)] = data
            box = self._log if reply.to < 0 else self.listener.boxes.get(("worker", reply.to))
            if box is not None:
                self.sent += (
                    len(data) if reply.to >= 0 else 0
                )  # first: whoever has it knows that it is counted
                box.put(data)

    def close(self) -> None:
        self.listener.close()
        if self._log is not None and self._connection is not None:
            self._log.close()
            wire.hang_up(self._connection)
