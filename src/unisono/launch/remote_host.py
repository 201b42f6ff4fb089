"""Another host as the supervisor sees it: its agent at the other end of a link. No torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.launch.link import Broken, HostLink
from unisono.launch.link_probe import LinkProbe
from unisono.launch.local_host import Message
from unisono.launch.stream_mux import StreamMux

BEAT = 0.15
"""Seconds between two signs of life of an agent, and of the supervisor."""
GONE = 5.0
"""Seconds without a byte after which a host is gone, where nobody says another number (`launch.host_timeout`)."""
LINES = 3  # of a worker: store, events, output


def stream_of(worker: int, line: int) -> int:
    """The number of a worker's line on the link. line: 0 store, 1 events, 2 output."""
    return LINES * worker + line


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
                case _:
                    reports.append(message)
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
