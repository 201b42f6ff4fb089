"""Another host as the supervisor sees it: its agent at the other end of a link. No torch."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.launch.hosts import Message, Process, RankHost
from unisono.launch.lanes import Lanes
from unisono.launch.link import Broken, HostLink
from unisono.launch.link_probe import LinkProbe

BEAT = 0.15
"""Seconds between two signs of life of an agent, and of the supervisor."""
GONE = 5.0
"""Seconds without a byte after which a host is gone, where nobody says another number (`launch.host_timeout`)."""
LINES = 3  # of a rank: store, events, output


def lane_of(seat: int, line: int) -> int:
    """The number of a rank's line. line: 0 store, 1 events, 2 output."""
    return LINES * seat + line


@dataclass
class FarProcess(Process):
    """A rank on another host, by the number of its seat."""

    pid: int
    seat: int
    host: "FarHost"
    stopped: bool = False

    def kill(self, number: int) -> None:
        self.host.say({"op": "kill", "seat": self.seat, "signal": int(number)})

    def is_stopped(self) -> bool:
        return self.stopped

    def ended(self) -> None:
        return  # its host sees to that: an agent whose link ends kills its ranks


@dataclass
class FarHost(RankHost):
    """gone: seconds without a byte from it, after which it is lost."""

    far = True

    name: str
    room: int
    cores: int
    link: HostLink
    address: str = ""
    gone: float = GONE
    lanes: Lanes = field(init=False)
    _said: float = 0.0
    _over: bool = False
    _ranks: dict[int, FarProcess] = field(default_factory=dict)
    _probe: LinkProbe = field(default_factory=LinkProbe)

    def __post_init__(self) -> None:
        self.lanes = Lanes(self.link)

    def fileno(self) -> int:
        return self.lanes.fileno()

    def say(self, message: dict[str, Any]) -> None:
        """Tell the agent; one that is gone does not mind."""
        try:
            self.lanes.say(message)
        except Broken:
            self._over = True

    def order(self, message: Message, files: Sequence[int] = ()) -> None:
        if self._over:
            raise ConnectionError(f"host {self.name} is gone")
        for line, file in enumerate(files):
            self.lanes.carry(lane_of(message["seat"], line), os.dup(file), reads=line < LINES - 1)
        self.say(message)

    def hear(self) -> list[tuple[Message, list[int]]] | None:
        try:
            said = self.lanes.turn()
        except Broken:
            self._over = True
            return None
        found = list[tuple[Message, list[int]]]()
        for message in said:
            match message.get("op"):
                case "beat":
                    pass
                case "probed":
                    self._ask(self._probe.answered(message["number"], time.monotonic()))
                    self.delay, self.rate = self._probe.delay, self._probe.rate
                case "stopped" if (rank := self._ranks.get(message["seat"])) is not None:
                    rank.stopped = message["stopped"]
                case _:
                    found.append((message, []))
        return found

    def probe(self) -> None:
        """Measure the link, while it has nothing else to carry."""
        self._ask(self._probe.begin(time.monotonic()))

    def _ask(self, lengths: Sequence[int]) -> None:
        for nbytes in lengths:
            self.say({"op": "probe", "number": self._probe.number, "data": "x" * nbytes})

    def beat(self, now: float) -> bool:
        """Give the agent a sign of life when one is due; what waits to be sent is one. Returns whether the host is
        still there."""
        if now - self._said >= BEAT and not self.link.owed:
            self._said = now
            self.say({"op": "beat"})
        return not self._over and now - self.link.heard < self.gone

    def process(self, message: Message, files: Sequence[int]) -> Process:
        self._ranks[message["seat"]] = rank = FarProcess(message["pid"], message["seat"], self)
        return rank

    def abandon(self) -> None:
        self.say({"op": "end"})

    def close(self) -> None:
        """The run is over, or the host is: whatever runs there ends."""
        self._over = True
        self.lanes.close()
