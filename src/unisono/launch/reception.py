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
from typing import Any

from unisono.launch import link, wire
from unisono.launch.far_host import GONE, FarHost
from unisono.launch.link import HostLink, Refused
from unisono.launch.tls import certificate

KNOCKS = 64
"""Strangers that are listened to at once."""
DOOR = "door.json"
AGAIN = 1.0
"""Seconds after which it is tried again to open a door for which there was no descriptor."""
_CORES = 1 << 16


@dataclass
class _Knock:
    """greeted: it was asked to prove itself, over TLS if there is any."""

    sock: socket.socket
    address: str
    asked: dict[str, Any]
    since: float
    greeted: bool = False
    data: bytearray = field(default_factory=bytearray)


@dataclass
class Reception:
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
    _knocks: dict[int, _Knock] = field(default_factory=dict)
    _deaf: float | None = None
    _selector: selectors.EpollSelector = field(default_factory=selectors.EpollSelector)

    @classmethod
    def at(cls, address: str, private: bool = False, gone: float = GONE) -> "Reception":
        """On a free port of an address of this host. private: over TLS. Raises OSError, UsageError U-L12."""
        tls, known = certificate() if private else (None, "")
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, 0), family=family, backlog=KNOCKS)
        return cls(secrets.token_hex(32), address, listener, tls=tls, certificate=known, gone=gone)

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
        path = run_dir / DOOR
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(json.dumps(self.door) + "\n")

    def fileno(self) -> int:
        return self._selector.fileno()

    def turn(self) -> list[FarHost]:
        """Listen to who has knocked, without waiting; hosts that have proven themselves."""
        joined = list[FarHost]()
        for key, _ in self._selector.select(0):
            if key.fileobj is self.listener:
                self._open()
            elif (knock := self._knocks.get(key.fd)) is not None:
                with self._or_refused(knock):
                    if (host := self._heard(knock)) is not None:
                        joined.append(host)
        return joined

    def next_deadline(self) -> float | None:
        """When the patience with a stranger ends."""
        due = [knock.since + link.PATIENCE for knock in self._knocks.values()]
        return min([*due, *([] if self._deaf is None else [self._deaf + AGAIN])], default=None)

    def expire(self) -> None:
        """End the connections of strangers who have not proven themselves in time, and hear knocks again if it could
        not be."""
        if self._deaf is not None and time.monotonic() - self._deaf >= AGAIN:
            self._deaf = None
            self._selector.register(self.listener, selectors.EVENT_READ)
        for knock in list(self._knocks.values()):
            if time.monotonic() - knock.since >= link.PATIENCE:
                with self._or_refused(knock):
                    raise Refused("who called said nothing")

    def close(self) -> None:
        for knock in list(self._knocks.values()):
            self._leave(knock)
            knock.sock.close()
        self._selector.close()
        self.listener.close()

    def _open(self) -> None:
        try:
            sock, where = self.listener.accept()
        except BlockingIOError:
            return
        except (
            OSError
        ):  # no descriptor is free: who knocks waits until one may be, and nobody turns in circles
            self._selector.unregister(self.listener)
            self._deaf = time.monotonic()
            return
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            if len(self._knocks) >= KNOCKS:
                sock.close()
                return
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            knock = _Knock(sock, str(where[0]), link.challenge(), time.monotonic())
            self._knocks[sock.fileno()] = knock
            self._selector.register(sock, selectors.EVENT_READ)
            if self.tls is None:
                self._greet(knock)

    def _greet(self, knock: _Knock) -> None:
        knock.greeted = True
        knock.sock.send(wire.frame(wire.dumps(knock.asked)))

    def _heard(self, knock: _Knock) -> FarHost | None:
        """The host, once it has proven itself. Raises Refused, OSError."""
        try:
            if isinstance(knock.sock, ssl.SSLSocket) and not knock.greeted:
                knock.sock.do_handshake()
                self._greet(knock)
            data = knock.sock.recv(link.GREETING)
        except link.LATER:
            return None
        if not data:
            raise ConnectionError("it left")
        knock.data += data
        if len(knock.data) < wire.HEAD.size:
            return None
        (length,) = wire.HEAD.unpack_from(knock.data)
        if length > link.GREETING:
            raise Refused("what came is no greeting")
        if len(knock.data) < wire.HEAD.size + length:
            return None
        if len(knock.data) > wire.HEAD.size + length:
            raise Refused("more came than a greeting")
        answered = link.parse(bytes(knock.data[wire.HEAD.size :]))
        said, proved = link.admitted(self.token, knock.asked, answered)
        self._leave(knock)
        knock.sock.send(wire.frame(wire.dumps(proved)))
        made = HostLink.between(
            knock.sock, self.token, knock.asked["nonce"], answered["nonce"], is_caller=False
        )
        room, cores = _count(said.get("room")), _count(said.get("cores"))
        return FarHost(str(said.get("name"))[:100], room, cores, made, knock.address, self.gone)

    @contextlib.contextmanager
    def _or_refused(self, knock: _Knock) -> Iterator[None]:
        try:
            yield
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            self._leave(knock)
            knock.sock.close()
            if isinstance(error, Refused):
                self.refused(f"{knock.address} was refused: {error}")

    def _leave(self, knock: _Knock) -> None:
        self._knocks.pop(knock.sock.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(knock.sock)


def _count(value: Any) -> int:
    """A number that makes sense. Raises Refused."""
    if not isinstance(value, int) or not 0 < value <= _CORES:
        raise Refused(f"{value!r} is no number of ranks or cores")
    return value
