"""One connection between the supervisors of two hosts: proven by a token, every frame sealed and numbered. No torch.

Who calls and who is called both prove that they know the run's token, without sending it: each draws a number, and
answers the other's with its keyed hash (HMAC-SHA256, compared in constant time). Keys for the frames follow from token
and numbers, one a direction. A frame carries a hash over its number and its bytes, so one that is made up, changed,
left out or sent again ends the connection. What is sent can be read on its way; TLS around it hides it (`tls`).

    called                             caller
    {"unisono": 1, "nonce": N}   ->
                                 <-    {"nonce": M, "proof": hash of N, M and what it says, ...}
    {"proof": hash of M and N}   ->
"""

import hashlib
import hmac
import json
import secrets
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

from unisono.launch import wire

VERSION = 1
GREETING = 4096
"""Bytes that a stranger may send; more ends the connection unread."""
PATIENCE = 5.0
"""Seconds in which a stranger has to prove itself."""
MOST = 1 << 24
"""Bytes of one frame."""
BACKLOG = 8 << 20
"""Bytes that wait to be sent, from which on nobody should send more."""
AT_ONCE = 1 << 22
"""Bytes that are taken in before what they say is heard: the other side may send without end."""
_PIECE = 1 << 18
_SEAL = 16
LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a socket raises that would have to wait."""


class Refused(ConnectionError):
    """The other side does not know the token, or speaks another language; in words."""


class Broken(ConnectionError):
    """The connection has ended, or what came over it was not what the other side sent."""


def proof(token: str, who: str, *parts: str) -> str:
    """What only one who knows the token can say of these parts."""
    text = "\0".join((who, *parts)).encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def is_proof(text: Any, token: str, who: str, *parts: str) -> bool:
    """Whether it is; in a time that does not depend on where it differs."""
    return isinstance(text, str) and hmac.compare_digest(
        text.encode(errors="replace"), proof(token, who, *parts).encode()
    )


def challenge() -> dict[str, Any]:
    """What the called side says first."""
    return {"unisono": VERSION, "nonce": secrets.token_hex(32)}


def answer(token: str, challenge: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """What the caller says to it: `said`, with its proof. Raises Refused."""
    if challenge.get("unisono") != VERSION or not isinstance(challenge.get("nonce"), str):
        raise Refused("who answers there is no unisono of this version")
    nonce = secrets.token_hex(32)
    return {
        **facts,
        "nonce": nonce,
        "proof": proof(token, "caller", challenge["nonce"], nonce, json.dumps(facts, sort_keys=True)),
    }


def admitted(
    token: str, challenge: dict[str, Any], answered: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the caller says, the called side's own proof). Raises Refused."""
    facts = {key: value for key, value in answered.items() if key not in ("nonce", "proof")}
    nonce = answered.get("nonce")
    if not isinstance(nonce, str) or not is_proof(
        answered.get("proof"), token, "caller", challenge["nonce"], nonce, json.dumps(facts, sort_keys=True)
    ):
        raise Refused("a stranger, who does not know the run's token")
    return facts, {"proof": proof(token, "called", nonce, challenge["nonce"])}


def check_called(
    token: str, challenge: dict[str, Any], answered: dict[str, Any], proved: dict[str, Any]
) -> None:
    """That the called side knows the token too. Raises Refused."""
    if not is_proof(proved.get("proof"), token, "called", answered["nonce"], challenge["nonce"]):
        raise Refused("who answers there does not know the token")


def parse(payload: bytes) -> dict[str, Any]:
    """A greeting. Raises Refused."""
    try:
        greeting = json.loads(payload)
    except (ValueError, RecursionError):
        greeting = None
    if not isinstance(greeting, dict):
        raise Refused("what came is no greeting")
    return greeting


@dataclass
class HostLink:
    """A connection after both sides have proven themselves. sock: from here on it never blocks. seals, opens: keys of
    what goes and of what comes. heard: when a byte last came, by the monotonic clock: a large frame over a slow link
    takes its time, and whoever sends it lives."""

    sock: socket.socket
    seals: bytes = field(repr=False)
    opens: bytes = field(repr=False)
    owed: bytearray = field(default_factory=bytearray)
    heard: float = field(default_factory=time.monotonic)
    _in: wire.Frames = field(default_factory=lambda: wire.Frames(MOST))
    _sent: int = 0
    _got: int = 0

    @classmethod
    def between(
        cls, sock: socket.socket, token: str, called: str, caller: str, is_caller: bool
    ) -> "HostLink":
        """called, caller: their numbers."""
        keys = [
            hmac.new(token.encode(), f"{way}\0{called}\0{caller}".encode(), hashlib.sha256).digest()
            for way in ("to called", "to caller")
        ]
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outward, inward = keys if is_caller else reversed(keys)
        return cls(sock, outward, inward)

    def send(self, payload: bytes) -> None:
        """Send a frame, as much of it as the connection takes now; the rest is owed. Raises Broken."""
        seal = _hash(self.seals, self._sent, payload)
        self._sent += 1
        self.owed += wire.frame(seal + payload)
        self.pay()

    def pay(self) -> bool:
        """Send what is owed; True while some is left. Raises Broken."""
        try:
            while self.owed:
                del self.owed[: self.sock.send(self.owed)]
        except LATER:
            return True
        except OSError as error:
            raise Broken(str(error)) from error
        return False

    def receive(self) -> list[bytes]:
        """Frames that have come whole, of at most about `AT_ONCE` bytes. Raises Broken."""
        over, room, frames = False, AT_ONCE, list[bytes]()
        try:
            # While TLS holds some: of those nobody is told that they can be read.
            while room > 0 or self._held():
                if not (data := self.sock.recv(_PIECE)):
                    over = True
                    break
                frames += self._in.feed(data)
                room -= len(data)
                self.heard = time.monotonic()
        except LATER:
            pass
        except (OSError, ValueError) as error:
            raise Broken(str(error)) from error
        if over and not frames:
            raise Broken("the other side closed the connection")
        return [self._opened(frame) for frame in frames]

    def _held(self) -> bool:
        """Whether TLS has decoded bytes that were not read."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def _opened(self, frame: bytes) -> bytes:
        """The payload of the next frame. Raises Broken."""
        seal, payload = frame[:_SEAL], frame[_SEAL:]
        if not hmac.compare_digest(seal, _hash(self.opens, self._got, payload)):
            raise Broken("a frame that the other side did not send so, or not now")
        self._got += 1
        return payload

    def close(self) -> None:
        self.sock.close()


def _hash(key: bytes, number: int, payload: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little") + payload, key=key, digest_size=_SEAL).digest()
