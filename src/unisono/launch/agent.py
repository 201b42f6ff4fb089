"""What lends a host to a run whose supervisor is on another one: `unisono host`. No torch.

The agent has a helper of its own, which forks ranks as the supervisor asks; it carries their lines over one link, and
tells how they end. When the link ends, or the supervisor is silent, it ends its ranks and calls again: the helper,
which has imported torch and read the data, stays.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import link, tls, wire
from unisono.launch.far_host import BEAT, GONE, lane_of
from unisono.launch.hosts import OwnProcess
from unisono.launch.lanes import Lanes
from unisono.launch.link import Broken, HostLink, Refused
from unisono.launch.nursery import cores, start_helper
from unisono.launch.recovery import LOOK_EVERY
from unisono.launch.seats import ends
from unisono.launch.signals import Signals
from unisono.spec.errors import UsageError

AGAIN = 0.3
"""Seconds between two calls."""
_ANSWER = 5.0


class Ended(Exception):
    """The supervisor needs this host no more, or nobody does."""


@dataclass
class _Rank:
    process: OwnProcess
    stopped: bool = False


@dataclass
class Agent:
    """door: tells address, port and token of the run, anew for each call. entry: what its helper imports. patience:
    seconds for which it calls in vain. say(text): for people."""

    door: Callable[[], dict[str, Any]]
    name: str
    room: int
    entry: str
    patience: float = 60.0
    say: Callable[[str], None] = lambda text: None
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _start: str = ""
    _looked: float = 0.0
    _where: str = ""
    _silent: float = 2 * GONE

    def run(self) -> None:
        """Serve until the run is over. Raises Refused for a wrong token, ConnectionError where nobody answers."""
        self._control, self._helper = start_helper(self.entry)
        try:
            with Signals() as signals:
                self._signals = signals
                while True:
                    lanes = self._called()
                    self.say(f"joined {self._where} with room for {self.room}")
                    try:
                        self._serve(lanes)
                    except Broken as error:
                        self.say(f"lost the supervisor ({error}); calling again")
                    finally:
                        self._end_ranks()
                        lanes.close()
        except Ended:
            return
        finally:
            self._control.close()
            self._helper.kill()
            self._helper.wait()

    def _called(self) -> Lanes:
        """A link to the supervisor. Raises Refused, ConnectionError, Ended."""
        until, last = time.monotonic() + self.patience, ""
        while time.monotonic() < until:
            try:
                door = self.door()
                self._silent = float(door.get("silent", self._silent))
                self._where = f"{door['address']}:{door['port']}"
                return Lanes(call(door, {"name": self.name, "room": self.room, "cores": cores()}))
            except Refused:
                raise
            except UsageError as error:  # no door at present: another supervisor may make one
                last = error.what
            except OSError as error:
                last = str(error)
            if self._signals.take():
                raise Ended
            self._end_ranks()  # one may have been born since
            time.sleep(AGAIN)
        raise ConnectionError(f"nobody answers at {self._where} ({last})")

    def _serve(self, lanes: Lanes) -> None:
        """Raises Broken, Ended."""
        said = 0.0
        with selectors.DefaultSelector() as selector:
            for file in (lanes, self._control, self._signals):
                selector.register(file, selectors.EVENT_READ, file)
            while True:
                ready = [key.data for key, _ in selector.select(BEAT / 2)]
                now = time.monotonic()
                if self._signals in ready and self._signals.take():
                    raise Ended
                if lanes in ready:
                    for message in lanes.turn():
                        self._obey(lanes, message)
                if self._control in ready:
                    self._hear_helper(lanes)
                if now - said >= BEAT and not lanes.link.owed:
                    said = now
                    lanes.say({"op": "beat"})
                if now - lanes.link.heard > self._silent:
                    raise Broken(f"silent for {self._silent:g} s")
                if now - self._looked >= LOOK_EVERY:
                    self._looked = now
                    self._look(lanes)

    def _obey(self, lanes: Lanes, message: dict[str, Any]) -> None:
        match message.get("op"):
            case "run" if message["token"] == self._start:
                lanes.say({"op": "prepared"})  # read before, and still there
            case "run":
                self._start = message["token"]
                wire.send_message(self._control, message)
            case "seat":
                ours, theirs = ends()
                for line, end in enumerate(ours):
                    file = end if isinstance(end, int) else end.detach()
                    lanes.carry(lane_of(message["seat"], line), file, writes=line < len(ours) - 1)
                try:
                    wire.send_message(self._control, message, theirs)
                finally:
                    for file in theirs:
                        os.close(file)
            case "kill" if (rank := self._ranks.get(message["seat"])) is not None:
                rank.process.kill(message["signal"])
            case "probe":
                lanes.say({"op": "probed", "number": message["number"]})
            case "end":
                raise Ended

    def _hear_helper(self, lanes: Lanes | None) -> None:
        """Raises Ended when the helper has gone."""
        try:
            said = wire.read_message(self._control)
        except OSError:
            said = None
        if said is None:
            raise Ended
        message, files = said
        match message["op"]:
            case "born":
                self._ranks[message["seat"]] = _Rank(OwnProcess(message["pid"], files[0]))
            case "exit":
                if (rank := self._ranks.pop(message["seat"], None)) is not None:
                    rank.process.close()
                for line in range(3):
                    if lanes is not None:
                        lanes.drain(lane_of(message["seat"], line))
            case _:
                pass
        if lanes is not None:
            lanes.say(message)

    def _look(self, lanes: Lanes) -> None:
        for seat, rank in self._ranks.items():
            if (stopped := rank.process.is_stopped()) != rank.stopped:
                rank.stopped = stopped
                lanes.say({"op": "stopped", "seat": seat, "stopped": stopped})

    def _end_ranks(self) -> None:
        """Kill those that live, and wait until they are gone; a rank that is being born meanwhile too."""
        until = time.monotonic() + _ANSWER
        while time.monotonic() < until:
            for rank in self._ranks.values():
                rank.process.kill(signal.SIGKILL)
            if not self._bury() or not self._ranks:
                return

    def _bury(self) -> bool:
        """What the helper has to say while there is no supervisor; False once it has gone, and its ranks with it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while selector.select(0.05):
                with contextlib.suppress(Ended):
                    self._hear_helper(None)
                    continue
                return False
        return True


def call(door: dict[str, Any], said: dict[str, Any]) -> HostLink:
    """A link to a supervisor, after both have proven themselves. Raises Refused, OSError."""
    sock = socket.create_connection((door["address"], door["port"]), _ANSWER)
    try:
        if door.get("certificate"):
            sock = tls.called(sock, door["certificate"])
        asked = link.parse(_greeting(sock))
        answered = link.answer(door["token"], asked, said)
        sock.sendall(wire.frame(wire.dumps(answered)))
        try:
            proved = link.parse(_greeting(sock))
        except ConnectionError as error:
            raise Refused("the supervisor refuses this host: the token is of another run") from error
        link.check_called(door["token"], asked, answered, proved)
        return HostLink.between(sock, door["token"], asked["nonce"], answered["nonce"], is_caller=True)
    except BaseException:
        sock.close()
        raise


def _greeting(sock: socket.socket) -> bytes:
    """One small frame. Raises Refused, OSError."""
    try:
        return wire.read_frame(sock, link.GREETING)
    except ValueError as error:
        raise Refused("what came is no greeting") from error
