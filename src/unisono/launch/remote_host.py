"""Another host as the supervisor sees it: its agent at the other end of a link. No torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.launch.link import Broken, HostLink
from unisono.launch.local_host import Message
from unisono.launch.stream_mux import StreamMux

BEAT = 0.15
"""Seconds between two signs of life of an agent, and of the supervisor."""
GONE = 5.0
"""Seconds without a byte after which a host is gone, where nobody says another number (`launch.host_timeout`)."""
LINES = 3  # of a worker: store, events, output
PIECE = 1 << 15
"""Bytes of one message of a round of a probe."""
_SMALL, _MOST = 3, 16
_LONG = 0.3
"""Seconds of a round that tells a rate."""


def stream_of(worker: int, line: int) -> int:
    """The number of a worker's line on the link. line: 0 store, 1 events, 2 output."""
    return LINES * worker + line


@dataclass
class LinkProbe:
    """How quick a link is, measured by messages that the other side answers. A few of a byte tell its delay. Then come
    rounds of pieces, each of twice as many as the one before, until a round takes long enough to tell a rate: so a slow
    link is asked for a few pieces only. Pure: no socket, no clock.

    delay: seconds of a small message one way. rate: bit/s, 0 until it is known. number: of the messages that count,
    so that an answer to a probe before this one is none."""

    delay: float = 0.0
    rate: float = 0.0
    number: int = 0
    _small: list[float] = field(default_factory=list)
    _began: float = 0.0
    _pieces: int = 0
    _answers: list[float] = field(default_factory=list)

    def begin(self, now: float) -> list[int]:
        """Bytes of the messages to send at first."""
        self.number += 1
        self._small, self._pieces = [], 0
        return self._ask(1, now)

    def answered(self, number: int, now: float) -> list[int]:
        """Bytes of the messages to send after an answer to one of that number; none while others are awaited, or at the
        end."""
        if number != self.number:
            return []
        if len(self._small) < _SMALL:
            self._small.append(now - self._began)
            return self._ask(1 if len(self._small) < _SMALL else PIECE, now)
        self._answers.append(now)
        if len(self._answers) < self._pieces:
            return []
        took = now - self._began
        self.delay, self.rate = min(self._small) / 2, self._measured(took)
        if took >= _LONG or self._pieces >= _MOST:
            return []
        return self._ask(PIECE, now, 2 * self._pieces)

    def _ask(self, nbytes: int, now: float, times: int = 1) -> list[int]:
        self._began, self._pieces, self._answers = now, times, []
        return [nbytes] * times

    def _measured(self, took: float) -> float:
        """Bit/s of the round that is over: of several pieces, from the first to the last, for the first waits until the
        connection is up to speed."""
        first, last = self._answers[0], self._answers[-1]
        pieces, seconds = (self._pieces - 1, last - first) if self._pieces > 2 else (self._pieces, took)
        return 8 * PIECE * pieces / max(seconds - (min(self._small) if self._pieces <= 2 else 0.0), 1e-4)


@dataclass
class RemoteHost:
    """Another host, whose agent is at the other end of a link. gone: seconds without a byte from it, after which it is
    lost."""

    name: str
    room: int
    cores: int
    link: HostLink
    address: str = ""
    gone: float = GONE
    mux: StreamMux = field(init=False)
    _said: float = 0.0
    _over: bool = False
    _exits: list[Message] = field(default_factory=list)
    _probe: LinkProbe = field(default_factory=LinkProbe)

    def __post_init__(self) -> None:
        self.mux = StreamMux(self.link)

    @property
    def rate(self) -> float:
        return self._probe.rate

    @property
    def delay(self) -> float:
        return self._probe.delay

    def fileno(self) -> int:
        return self.mux.fileno()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        if message["op"] == "probe":  # while the link has nothing else to carry
            self._ask(self._probe.begin(time.monotonic()))
            return
        for line, file in enumerate(files):
            self.mux.carry(stream_of(message["worker"], line), os.dup(file), reads=line < LINES - 1)
        self._say(message)

    def poll(self) -> list[Message]:
        reports = list[Message]()
        try:
            received = self.mux.turn() if not self._over else []
        except Broken:
            self._over, received = True, []
        for message in received:
            match message.get("op"):
                case "beat":
                    pass
                case "probed":
                    self._ask(self._probe.answered(message["number"], time.monotonic()))
                case "exit":
                    self._exits.append(message)
                case _:
                    reports.append(message)
        reports += self._ended()
        now = time.monotonic()
        if now - self._said >= BEAT and not self.link.owed:  # what waits to be sent is a sign of life too
            self._said = now
            self._say({"op": "beat"})
        if self._over or now - self.link.heard >= self.gone:
            reports.append({"op": "gone"})
        return reports

    def next_poll(self) -> float | None:
        return self._said + BEAT

    def close(self) -> None:
        """The run is over, or the host is: whatever runs there ends."""
        self._over = True
        self.mux.close()

    def _ended(self) -> list[Message]:
        """Ends of workers, each after the last byte of what the worker said, asked and printed: a pipe holds 64 KiB,
        and who hears of the end reads what lies there and closes it."""
        over = [
            exit
            for exit in self._exits
            if self._over or not any(self.mux.owes(stream_of(exit["worker"], line)) for line in range(LINES))
        ]
        self._exits = [exit for exit in self._exits if exit not in over]
        return over

    def _ask(self, lengths: Sequence[int]) -> None:
        for nbytes in lengths:
            self._say({"op": "probe", "number": self._probe.number, "data": "x" * nbytes})

    def _say(self, message: Message) -> None:
        """Tell the agent; one that is gone does not mind."""
        if not self._over:
            try:
                self.mux.say(message)
            except Broken:
                self._over = True
