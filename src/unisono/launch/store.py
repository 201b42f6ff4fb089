"""The supervisor's half of the bootstrap store: keys and values that ranks meet over. No torch, no port.

Each rank holds one end of a socket pair, so who speaks is known without any secret, and nothing listens on the network.
A request is a frame of fields `[id, op, ...]`; its answer is `[id, status, ...]`. Waiting requests are answered late
and out of order, which lets several threads of a rank use the store at once. The other half is `rank_store`.
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

ACROSS = b"across/"
"""What keys begin with that stay when ranks meet anew."""
OK, LATE, BAD, ANEW = b"+", b"t", b"-", b"a"


@dataclass
class _Wait:
    """A request that waits for `missing` keys; `key` is what to return then (None: nothing)."""

    who: int
    id: bytes
    missing: set[bytes]
    key: bytes | None
    over: bool = False


@dataclass
class StoreServer:
    """A pure state machine: requests in, answers out; `clock` is in seconds.

    `who` names a connection (here: a rank). Semantics are those of torch's TCPStore. It has the time as well: by its
    host's clock go those of all hosts.
    """

    clock: Callable[[], float] = time.monotonic
    values: dict[bytes, bytes] = field(default_factory=dict)
    _waits: dict[bytes, list[_Wait]] = field(default_factory=dict)  # that are not over, by missing key
    _deadlines: list[tuple[float, int, _Wait]] = field(default_factory=list)
    _count: int = 0
    _tidied: int = 0

    def handle(self, who: int, fields: list[bytes]) -> list[tuple[int, list[bytes]]]:
        """Answers that this request causes, to anyone, as (who, fields). One that makes no sense is answered so, and
        changes nothing; one that has no id or op raises ValueError: nobody waits for an answer to it."""
        if len(fields) < 2:
            raise ValueError("a store request without id or op")
        id, op, *rest = fields
        try:
            return self._answers(who, id, op, rest)
        except (ValueError, IndexError, TypeError):
            return [(who, [id, BAD, b"fields that make no sense for " + op[:40]])]

    def _answers(self, who: int, id: bytes, op: bytes, rest: list[bytes]) -> list[tuple[int, list[bytes]]]:
        if op == b"set":
            return [(who, [id, OK]), *self._put(rest[0], rest[1])]
        if op == b"get":
            return self._wait(_Wait(who, id, {rest[0]}, rest[0]), _seconds(rest[1]))
        if op == b"wait":
            return self._wait(_Wait(who, id, set(rest[1:]), None), _seconds(rest[0]))
        if op == b"add":
            return self._add(who, id, rest[0], int(rest[1]))
        if op == b"check":
            return [(who, [id, OK, b"1" if all(key in self.values for key in rest) else b"0"])]
        if op == b"delete":
            gone = self.values.pop(rest[0], None)
            return [(who, [id, OK, b"0" if gone is None else b"1"])]
        if op == b"time":
            return [(who, [id, OK, str(time.time_ns()).encode()])]
        if op == b"count":
            return [(who, [id, OK, str(len(self.values)).encode()])]
        if op == b"compare_set":
            return self._compare_set(who, id, *rest)
        if op == b"leave":
            return self.leave(who)  # nobody waits for an answer to that
        return [(who, [id, BAD, b"no such operation: " + op[:40]])]

    def _put(self, key: bytes, value: bytes) -> list[tuple[int, list[bytes]]]:
        self.values[key] = value
        answers = []
        for wait in self._waits.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                answers.append(self._done(wait))
        return answers

    def _done(self, wait: _Wait) -> tuple[int, list[bytes]]:
        wait.over = True
        value = [] if wait.key is None else [self.values[wait.key]]
        return wait.who, [wait.id, OK, *value]

    def _wait(self, wait: _Wait, seconds: float) -> list[tuple[int, list[bytes]]]:
        wait.missing = {key for key in wait.missing if key not in self.values}
        if not wait.missing:
            return [self._done(wait)]
        for key in wait.missing:
            self._waits.setdefault(key, []).append(wait)
        self._count += 1  # ties in time must not compare waits
        heapq.heappush(self._deadlines, (self.clock() + seconds, self._count, wait))
        if len(self._deadlines) > 2 * self._tidied + 64:  # most were answered long before their time
            self._deadlines = [entry for entry in self._deadlines if not entry[2].over]
            heapq.heapify(self._deadlines)
            self._tidied = len(self._deadlines)
        return []

    def _give_up(self, wait: _Wait) -> None:
        wait.over = True
        for key in wait.missing:
            rest = [other for other in self._waits[key] if other is not wait]
            if rest:
                self._waits[key] = rest
            else:
                del self._waits[key]

    def _add(self, who: int, id: bytes, key: bytes, amount: int) -> list[tuple[int, list[bytes]]]:
        try:
            total = str(int(self.values.get(key, b"0")) + amount).encode()
        except ValueError:
            return [(who, [id, BAD, b"add to a value that is no number: " + key])]
        return [(who, [id, OK, total]), *self._put(key, total)]

    def _compare_set(
        self, who: int, id: bytes, key: bytes, expected: bytes, desired: bytes
    ) -> list[tuple[int, list[bytes]]]:
        present = self.values.get(key)
        if present == expected or (present is None and not expected):
            return [(who, [id, OK, desired]), *self._put(key, desired)]
        return [(who, [id, OK, expected if present is None else present])]

    def expire(self) -> list[tuple[int, list[bytes]]]:
        """Answers to the requests whose time is over."""
        answers = []
        while self._deadlines and (self._deadlines[0][2].over or self._deadlines[0][0] <= self.clock()):
            wait = heapq.heappop(self._deadlines)[2]
            if not wait.over:
                self._give_up(wait)
                answers.append((wait.who, [wait.id, LATE, b", ".join(sorted(wait.missing))]))
        return answers

    def leave(self, who: int) -> list[tuple[int, list[bytes]]]:
        """Answers to all for which one waits, who leaves the meeting, or is gone: what it waits for may never come."""
        waits = [wait for _, _, wait in self._deadlines if wait.who == who and not wait.over]
        for wait in waits:
            self._give_up(wait)
        return [(who, [wait.id, ANEW]) for wait in waits]

    def meet(self) -> None:
        """Ranks meet anew: nobody reads any more what was said before."""
        self.values = {key: value for key, value in self.values.items() if key.startswith(ACROSS)}

    def next_deadline(self) -> float | None:
        """When `expire` next has something to do, on `clock`."""
        while self._deadlines and self._deadlines[0][2].over:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None


def _seconds(text: bytes) -> float:
    """Raises ValueError: a deadline that is no time would stand before all others for ever."""
    if not (seconds := float(text)) < float("inf"):
        raise ValueError("no time")
    return seconds
