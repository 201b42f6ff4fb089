"""What lends a host to a run whose supervisor is on another one: `unisono host`. No torch.

The agent has a fork server, which forks workers as the supervisor asks; it carries their lines over one link, and
reports how they end. When the link ends, or the supervisor is silent, it ends its workers and calls again: the fork
server, which has imported torch and read the data, stays.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.launch import link, tls, wire
from unisono.launch.link import Broken, HostLink, Refused
from unisono.launch.local_host import LocalHost, Message, cores
from unisono.launch.remote_host import BEAT, GONE, LINES, stream_of
from unisono.launch.signals import Signals
from unisono.launch.stream_mux import StreamMux
from unisono.launch.worker_handle import line_pairs
from unisono.spec.errors import UsageError

AGAIN = 0.3
"""Seconds between two calls."""
_ANSWER, _QUIET = 5.0, 0.05


class Ended(Exception):
    """The supervisor needs this host no more, or nobody does."""


@dataclass
class Agent:
    """door: tells address, port and token of the run, anew for each call. entry: what its fork server imports.
    patience: seconds for which it calls in vain. say(text): for people."""

    door: Callable[[], dict[str, Any]]
    name: str
    room: int
    entry: str
    patience: float = 60.0
    say: Callable[[str], None] = lambda text: None
    _token: str = ""
    _where: str = ""
    _silent: float = 2 * GONE

    def run(self) -> None:
        """Serve until the run is over. Raises Refused for a wrong token, ConnectionError where nobody answers."""
        self._host = LocalHost.start(self.name, self.room, self.entry)
        try:
            with Signals() as signals:
                self._signals = signals
                while True:
                    mux = self._called()
                    self.say(f"joined {self._where} with room for {self.room}")
                    try:
                        self._serve(mux)
                    except Broken as error:
                        self.say(f"lost the supervisor ({error}); calling again")
                    finally:
                        self._end_workers()
                        mux.close()
        except Ended:
            return
        finally:
            self._host.close()

    def _called(self) -> StreamMux:
        """A link to the supervisor. Raises Refused, ConnectionError, Ended."""
        until, last = time.monotonic() + self.patience, ""
        while time.monotonic() < until:
            try:
                door = self.door()
                self._silent = float(door.get("silent", self._silent))
                self._where = f"{door['address']}:{door['port']}"
                return StreamMux(call(door, {"name": self.name, "room": self.room, "cores": cores()}))
            except Refused:
                raise
            except UsageError as error:  # no door at present: another supervisor may make one
                last = error.what
            except OSError as error:
                last = str(error)
            if self._signals.take():
                raise Ended
            self._end_workers()  # one may have been born since
            time.sleep(AGAIN)
        raise ConnectionError(f"nobody answers at {self._where} ({last})")

    def _serve(self, mux: StreamMux) -> None:
        """Raises Broken, Ended."""
        sent = 0.0
        with selectors.DefaultSelector() as selector:
            for file in (mux, self._host, self._signals):
                selector.register(file, selectors.EVENT_READ, file)
            while True:
                ready = [key.data for key, _ in selector.select(BEAT / 2)]
                now = time.monotonic()
                if self._signals in ready and self._signals.take():
                    raise Ended
                if mux in ready:
                    for message in mux.turn():
                        self._obey(mux, message)
                for report in self._host.poll():
                    self._report(mux, report)
                if now - sent >= BEAT and not mux.link.owed:
                    sent = now
                    mux.say({"op": "beat"})
                if now - mux.link.heard > self._silent:
                    raise Broken(f"silent for {self._silent:g} s")

    def _obey(self, mux: StreamMux, message: Message) -> None:
        """A command of the supervisor. Raises Broken, Ended."""
        match message.get("op"):
            case "run" if message["token"] == self._token:
                mux.say({"op": "prepared"})  # read before, and still there
            case "run":
                self._token = message["token"]
                self._host.send(message)
            case "spawn":
                ours, theirs = line_pairs()
                for line, end in enumerate(ours):
                    file = end if isinstance(end, int) else end.detach()
                    mux.carry(stream_of(message["worker"], line), file, writes=line < len(ours) - 1)
                self._host.send(message, theirs)
                for file in theirs:
                    os.close(file)
            case "kill":
                self._host.send(message)
            case "probe":
                mux.say({"op": "probed", "number": message["number"]})
            case "end":
                raise Ended

    def _report(self, mux: StreamMux, report: Message) -> None:
        """Tell the supervisor. Raises Broken; Ended when the fork server has gone."""
        match report["op"]:
            case "gone":
                raise Ended
            case "exit":
                for line in range(LINES):
                    mux.drain(stream_of(report["worker"], line))
            case _:
                pass
        mux.say(report)

    def _end_workers(self) -> None:
        """Kill those that live, and wait until they are gone; one that is being born meanwhile too."""
        until = time.monotonic() + _ANSWER
        with selectors.DefaultSelector() as selector:
            selector.register(self._host, selectors.EVENT_READ)
            while time.monotonic() < until:
                self._host.kill_all()
                selector.select(_QUIET)
                reports = self._host.poll()
                if any(report["op"] == "gone" for report in reports) or (
                    not reports and self._host.is_empty()
                ):
                    return


def call(door: dict[str, Any], facts: dict[str, Any]) -> HostLink:
    """A link to a supervisor, after both have proven themselves. Raises Refused, OSError."""
    sock = socket.create_connection((door["address"], door["port"]), _ANSWER)
    try:
        if door.get("certificate"):
            sock = tls.called(sock, door["certificate"])
        return proven(sock, door["token"], facts)
    except BaseException:
        sock.close()
        raise


def proven(sock: socket.socket, token: str, facts: dict[str, Any]) -> HostLink:
    """The link that a connection becomes once both sides have proven that they know the token. Raises Refused,
    OSError."""
    challenge = link.parse(_greeting(sock))
    answered = link.answer(token, challenge, facts)
    sock.sendall(wire.frame(wire.dumps(answered)))
    try:
        proved = link.parse(_greeting(sock))
    except ConnectionError as error:
        raise Refused("the supervisor refuses this host: the token is of another run") from error
    link.check_called(token, challenge, answered, proved)
    return HostLink.between(sock, token, challenge["nonce"], answered["nonce"], is_caller=True)


def _greeting(sock: socket.socket) -> bytes:
    """One small frame. Raises Refused, OSError."""
    try:
        return wire.read_frame(sock, link.GREETING)
    except ValueError as error:
        raise Refused("what came is no greeting") from error
