"""The rank's half of the bootstrap store: a torch Store over a socket pair. Imports torch: rank side only."""

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from unisono.launch import store, wire


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class SocketStore(Store):
    """Keys and values held by the supervisor; semantics of torch's TCPStore, usable by several threads.

    Whoever finds nobody reading reads for all (leader and followers), so a thread that waits for a key never keeps
    another from setting one. Raises DistStoreError when a wait outlasts its timeout or the supervisor has gone.
    """

    def __init__(self, sock: socket.socket, timeout: timedelta = timedelta(seconds=600)) -> None:
        super().__init__()
        self._sock = sock
        self._limit = timeout
        self._sending = threading.Lock()
        self._turn = threading.Condition()
        self._reading = False
        self._answers: dict[bytes, list[bytes]] = {}
        self._last = 0

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def clone(self) -> "SocketStore":
        """The same store: it is safe to share between threads, so a copy needs no connection of its own."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", _bytes(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask(b"get", _bytes(key), self._seconds(self._limit))[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(b"wait", self._seconds(timeout or self._limit), *map(_bytes, keys))

    def add(self, key: str, value: int) -> int:
        return int(self._ask(b"add", _bytes(key), str(value).encode())[0])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *map(_bytes, keys))[0] == b"1"

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", _bytes(key))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(b"compare_set", _bytes(key), _bytes(expected_value), _bytes(desired_value))[0]

    @staticmethod
    def _seconds(limit: timedelta) -> bytes:
        return repr(limit.total_seconds()).encode()

    def _ask(self, op: bytes, *fields: bytes) -> list[bytes]:
        with self._sending:
            self._last += 1
            id = str(self._last).encode()
            try:
                self._sock.sendall(wire.frame(wire.join([id, op, *fields])))
            except OSError as error:
                raise DistStoreError(f"the launcher has gone ({error})") from error
        status, *rest = self._answer(id)
        if status == store.LATE:
            raise DistStoreError(f"nobody set {rest[0].decode(errors='replace')} in time")
        if status == store.BAD:
            raise DistStoreError(rest[0].decode(errors="replace"))
        return rest

    def _answer(self, id: bytes) -> list[bytes]:
        with self._turn:
            while id not in self._answers:
                if self._reading:
                    self._turn.wait()
                    continue
                self._reading = True
                self._turn.release()
                try:
                    got, *rest = wire.split(wire.read_frame(self._sock))
                except OSError as error:
                    raise DistStoreError(f"the launcher has gone ({error})") from error
                finally:
                    self._turn.acquire()
                    self._reading = False
                    self._turn.notify_all()
                self._answers[got] = rest
            return self._answers.pop(id)
