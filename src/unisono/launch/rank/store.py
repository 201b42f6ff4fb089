"""The rank's half of the bootstrap store: a torch Store over a socket pair. Imports torch: rank side only."""

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from unisono.launch import store, wire

_SOON = 0.1  # seconds


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@dataclass
class _Line:
    """The connection to the supervisor, for all stores of a rank. Whoever finds nobody reading reads for all (leader
    and followers), so a thread that waits for a key never keeps another from setting one. asking: the threads that wait
    for an answer."""

    sock: socket.socket
    sending: threading.Lock = field(default_factory=threading.Lock)
    turn: threading.Condition = field(default_factory=threading.Condition)
    reading: bool = False
    answers: dict[bytes, list[bytes]] = field(default_factory=dict)
    last: int = 0
    asking: set[int] = field(default_factory=set)

    def ask(self, op: bytes, fields: Sequence[bytes], over: Callable[[], bool]) -> bytes:
        """Send a request; returns the name of its answer. Raises DistStoreError once it is over."""
        with self.sending:
            if over():
                raise DistStoreError("the ranks meet anew")
            self.last += 1
            id = str(self.last).encode()
            try:
                self.sock.sendall(wire.frame(wire.join([id, op, *fields])))
            except OSError as error:
                raise DistStoreError(f"the launcher has gone ({error})") from error
        return id

    def answer(self, id: bytes, within: float | None = None) -> list[bytes]:
        """Wait for the answer of that name. within: seconds. Raises DistStoreError where it does not come."""
        self.asking.add(thread := threading.get_ident())
        until = None if within is None else time.monotonic() + within
        try:
            with self.turn:
                while id not in self.answers:
                    if until is not None and not self._comes(until):
                        raise DistStoreError("the launcher is silent")
                    self._read_or_wait()
                return self.answers.pop(id)
        finally:
            self.asking.discard(thread)

    def _comes(self, until: float) -> bool:
        """Whether there is something to read before then; another thread that reads is waited for. `turn` is held."""
        left = max(0.0, until - time.monotonic())
        if self.reading:
            return self.turn.wait(left)
        return bool(select.select([self.sock], [], [], left)[0])

    def _read_or_wait(self) -> None:
        """Read one answer, whosever it is; or wait while another thread reads. The lock `turn` is held."""
        if self.reading:
            self.turn.wait()
            return
        self.reading = True
        self.turn.release()
        try:
            got, *rest = wire.split(wire.read_frame(self.sock))
        except (OSError, ValueError) as error:
            raise DistStoreError(f"the launcher has gone ({error})") from error
        finally:
            self.turn.acquire()
            self.reading = False
            self.turn.notify_all()
        self.answers[got] = rest


class SocketStore(Store):
    """Keys and values held by the supervisor; semantics of torch's TCPStore, usable by several threads.

    line: a socket to the supervisor. prefix: of all keys: ranks that meet anew read no word of before. Raises
    DistStoreError when a wait outlasts its timeout, the supervisor has gone, or the ranks meet anew.
    """

    def __init__(
        self,
        line: "socket.socket | _Line",
        timeout: timedelta = timedelta(seconds=600),
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._line = line if isinstance(line, _Line) else _Line(line)
        self._limit = timeout
        self._prefix = prefix.encode()
        self._over = False

    def anew(self, prefix: str) -> "SocketStore":
        """The store of the next meeting. From now on this one answers nobody: whoever waits in it waits for ranks that
        may never speak."""
        self.end()
        return SocketStore(self._line, self._limit, prefix)

    def across(self) -> "SocketStore":
        """Keys that are the same in all meetings of the run, for those who stand beside the ranks and meet nobody."""
        return SocketStore(self._line, self._limit, store.ACROSS.decode())

    def end(self) -> None:
        """Answer nobody from now on. Who waits already is answered at once; by the supervisor, who knows them all."""
        if not self._over:
            self._over = True  # first: a request comes before the next one, or is none any more
            with suppress(DistStoreError):
                self._line.ask(b"leave", (), lambda: False)

    def is_asking(self) -> bool:
        """Whether the main thread waits for an answer, in this store or in one of another meeting."""
        return threading.main_thread().ident in self._line.asking

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def clone(self) -> "SocketStore":
        """The same store: it is safe to share between threads, so a copy needs no connection of its own."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask(b"get", self._key(key), self._seconds(self._limit))[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(b"wait", self._seconds(self._limit if timeout is None else timeout), *map(self._key, keys))

    def add(self, key: str, value: int) -> int:
        return int(self._ask(b"add", self._key(key), str(value).encode())[0])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *map(self._key, keys))[0] == b"1"

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", self._key(key))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(b"compare_set", self._key(key), _bytes(expected_value), _bytes(desired_value))[0]

    def time_ns(self) -> int:
        """Unix time of the supervisor's host, in nanoseconds. Nobody waits long for it: raises DistStoreError where the
        supervisor is slow to answer."""
        _, *rest = self._line.answer(self._line.ask(b"time", (), lambda: self._over), _SOON)
        return int(rest[0])

    def _key(self, key: str) -> bytes:
        return self._prefix + _bytes(key)

    @staticmethod
    def _seconds(limit: timedelta) -> bytes:
        return repr(limit.total_seconds()).encode()

    def _ask(self, op: bytes, *fields: bytes) -> list[bytes]:
        status, *rest = self._line.answer(self._line.ask(op, fields, lambda: self._over))
        if status == store.LATE:
            raise DistStoreError(f"nobody set {rest[0].decode(errors='replace')} in time")
        if status == store.BAD:
            raise DistStoreError(rest[0].decode(errors="replace"))
        if status == store.ANEW:
            raise DistStoreError("the ranks meet anew")
        return rest
