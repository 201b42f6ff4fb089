"""Where other hosts join a run: a port of the supervisor, behind which nothing happens without the token. No torch."""

import contextlib
import json
import os
import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from unisono.launch import link, wire
from unisono.launch.link import HostLink, Refused
from unisono.launch.remote_host import GONE, RemoteHost
from unisono.launch.tls import certificate

MOST_PENDING = 64
"""Strangers that are listened to at once."""
ADDRESS_FILE = "door.json"
AGAIN = 1.0
"""Seconds after which it is tried again to open a door for which there was no descriptor."""
_CORES = 1 << 16


@dataclass
class _Pending:
    """greeted: it was asked to prove itself, over TLS if there is any."""

    sock: socket.socket
    address: str
    challenge: dict[str, Any]
    since: float
    greeted: bool = False
    frames: wire.Frames = field(default_factory=lambda: wire.Frames(link.GREETING))


@dataclass
class HostListener:
    """token: of the run. address: by which other hosts reach this one. refused(text): hears of strangers. tls: what is
    said goes through it; `certificate` is the hash by which hosts know it. gone: seconds of silence of a host, after
    which it is lost; its agent waits twice as long for the supervisor."""

    token: str = field(repr=False)
    address: str
    listener: socket.socket
    refused: Callable[[str], None] = lambda text: None
    tls: ssl.SSLContext | None = None
    certificate: str = ""
    gone: float = GONE
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _deaf: float | None = None
    _selector: selectors.EpollSelector = field(default_factory=selectors.EpollSelector)

    @classmethod
    def at(cls, address: str, private: bool = False, gone: float = GONE, token: str = "") -> Self:
        """On a free port of an address of this host. private: over TLS. token: a new one if empty. Raises OSError,
        UsageError U-L12."""
        tls, known = certificate() if private else (None, "")
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, 0), family=family, backlog=MOST_PENDING)
        return cls(token or secrets.token_hex(32), address, listener, tls=tls, certificate=known, gone=gone)

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    @property
    def door(self) -> dict[str, Any]:
        """What a host has to know to join."""
        return {
            "address": self.address,
            "port": self.port,
            "token": self.token,
            "certificate": self.certificate,
            "silent": 2 * self.gone,
        }

    def write_door(self, run_dir: Path) -> None:
        """Keep it in the run's folder, for the owner's eyes."""
        path = run_dir / ADDRESS_FILE
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(json.dumps(self.door) + "\n")

    def fileno(self) -> int:
        return self._selector.fileno()

    def turn(self) -> list[Any]:
        """Listen to who has called, without waiting; hosts that have proven themselves."""
        joined = list[Any]()
        for key, _ in self._selector.select(0):
            if key.fileobj is self.listener:
                self._open()
            elif (pending := self._pending.get(key.fd)) is not None:
                with self._or_refused(pending):
                    if (host := self._heard(pending)) is not None:
                        joined.append(host)
        return joined

    def next_deadline(self) -> float | None:
        """When the patience with a stranger ends."""
        due = [pending.since + link.PATIENCE for pending in self._pending.values()]
        return min([*due, *([] if self._deaf is None else [self._deaf + AGAIN])], default=None)

    def expire(self) -> None:
        """End the connections of strangers who have not proven themselves in time, and hear callers again if it could
        not be."""
        if self._deaf is not None and time.monotonic() - self._deaf >= AGAIN:
            self._deaf = None
            self._selector.register(self.listener, selectors.EVENT_READ)
        for pending in list(self._pending.values()):
            if time.monotonic() - pending.since >= link.PATIENCE:
                with self._or_refused(pending):
                    raise Refused("who called said nothing")

    def close(self) -> None:
        for pending in list(self._pending.values()):
            self._leave(pending)
            pending.sock.close()
        self._selector.close()
        self.listener.close()

    def _open(self) -> None:
        try:
            sock, where = self.listener.accept()
        except BlockingIOError:
            return
        except (
            OSError
        ):  # no descriptor is free: who calls waits until one may be, and nobody turns in circles
            self._selector.unregister(self.listener)
            self._deaf = time.monotonic()
            return
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            if len(self._pending) >= MOST_PENDING:
                sock.close()
                return
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            pending = _Pending(sock, str(where[0]), link.challenge(), time.monotonic())
            self._pending[sock.fileno()] = pending
            self._selector.register(sock, selectors.EVENT_READ)
            if self.tls is None:
                self._greet(pending)

    def _greet(self, pending: _Pending) -> None:
        pending.greeted = True
        pending.sock.send(wire.frame(wire.dumps(pending.challenge)))

    def _heard(self, pending: _Pending) -> Any:
        """The host, None until it has proven itself. Raises Refused, OSError."""
        try:
            if isinstance(pending.sock, ssl.SSLSocket) and not pending.greeted:
                pending.sock.do_handshake()
                self._greet(pending)
            data = pending.sock.recv(link.GREETING)
        except link.LATER:
            return None
        if not data:
            raise ConnectionError("it left")
        try:
            greetings = pending.frames.feed(data)
        except ValueError as error:
            raise Refused("what came is no greeting") from error
        if not greetings:
            return None
        if len(greetings) > 1 or pending.frames.rest:
            raise Refused("more came than a greeting")
        answered = link.parse(greetings[0])
        token = self._token_of(answered)
        facts, proved = link.admitted(token, pending.challenge, answered)
        self._leave(pending)
        pending.sock.send(wire.frame(wire.dumps(proved)))
        host_link = HostLink.between(
            pending.sock, token, pending.challenge["nonce"], answered["nonce"], is_caller=False
        )
        return self._member(facts, host_link, pending.address)

    def _token_of(self, answered: dict[str, Any]) -> str:
        """The token that who says this has to know. Raises Refused."""
        return self.token

    def _member(self, facts: dict[str, Any], host_link: HostLink, address: str) -> Any:
        """What joins over a link that is proven, by what it says of itself. Raises Refused."""
        room, cores = _count(facts.get("room")), _count(facts.get("cores"))
        return RemoteHost(str(facts.get("name"))[:100], room, cores, host_link, address, self.gone)

    @contextlib.contextmanager
    def _or_refused(self, pending: _Pending) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            self._leave(pending)
            pending.sock.close()
            if isinstance(error, Refused):
                self.refused(f"{pending.address} was refused: {error}")

    def _leave(self, pending: _Pending) -> None:
        self._pending.pop(pending.sock.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pending.sock)


def _count(value: Any) -> int:
    """A number that makes sense. Raises Refused."""
    if not isinstance(value, int) or not 0 < value <= _CORES:
        raise Refused(f"{value!r} is no number of ranks or cores")
    return value
