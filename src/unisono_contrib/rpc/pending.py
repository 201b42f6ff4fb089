"""Calls that wait for an answer, each with the time by which it must come."""

import heapq
import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

from unisono_contrib.rpc.errors import CallTimeout, PeerLost
from unisono_contrib.rpc.futures import CallFuture
from unisono_contrib.rpc.switchboard import Connection

_LATER = 60.0


@dataclass(frozen=True, slots=True)
class PendingCall:
    connection: Connection
    future: CallFuture[Any]
    path: str
    context: int
    seconds: float


class PendingCalls:
    """All unanswered calls of a worker, by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, PendingCall] = {}
        self._times: list[tuple[float, int]] = []
        self._next = itertools.count(1).__next__

    def add(
        self, connection: Connection, future: CallFuture[Any], path: str, context: int, seconds: float
    ) -> int:
        """Note a call; its number. seconds: after which it fails; never if 0."""
        with self._lock:
            number = self._next()
            self._calls[number] = PendingCall(connection, future, path, context, seconds)
            if seconds > 0:
                heapq.heappush(self._times, (time.monotonic() + seconds, number))
        return number

    def pop(self, number: int) -> PendingCall | None:
        with self._lock:
            return self._calls.pop(number, None)

    def futures(self) -> list[CallFuture[Any]]:
        """Of all calls that are not answered yet."""
        with self._lock:
            return [call.future for call in self._calls.values()]

    def fail(self, connection: Connection, error: PeerLost) -> None:
        """End all calls over a connection."""
        with self._lock:
            numbers = [number for number, call in self._calls.items() if call.connection is connection]
            calls = [self._calls.pop(number) for number in numbers]
        for call in calls:
            call.future.set_exception(error)

    def expire(self) -> float:
        """End calls whose time is over; when the next one's is, by the monotonic clock."""
        late = list[PendingCall]()
        with self._lock:
            now = time.monotonic()
            while self._times and (self._times[0][1] not in self._calls or self._times[0][0] <= now):
                if (call := self._calls.pop(heapq.heappop(self._times)[1], None)) is not None:
                    late.append(call)
            due = self._times[0][0] if self._times else now + _LATER
        for call in late:
            peer = call.connection.peer
            call.future.set_exception(
                CallTimeout(
                    f"{call.path} on worker {peer.name} did not return within {call.seconds:g} s",
                    where="unisono.rpc", rank=peer.rank, host=peer.host,
                    fix="timeout=SECONDS of the call or of rpc.init; 0 waits for ever",
                )
            )  # fmt: skip
        return due
