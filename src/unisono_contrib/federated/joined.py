"""The clients of an organisation in this process: join a server, train as it asks, until the run is over."""

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unisono.launch.agent import proven
from unisono.launch.link import Broken, HostLink, Refused
from unisono.spec.errors import PeerGone, UnisonoError, UsageError, UserCodeError
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import ClientHost
from unisono_contrib.federated.messages import Inbox, Message, answer_frames, frames_of, reply_frames, task_of
from unisono_contrib.federated.secure.frames import request_of

_ANSWER, _AGAIN = 5.0, 0.3


@dataclass(frozen=True, slots=True)
class JoinPlace:
    """Where to join, as whom. clients: as `numbers_in` reads them. tls: None in a network that is trusted. patience:
    seconds for which it calls in vain, before and after it has joined."""

    address: str
    port: int
    organisation: str
    token: str
    clients: str
    tls: ssl.SSLContext | None
    patience: float

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def serve(
    place: JoinPlace, same: Mapping[str, Any], host: ClientHost, most: int, note: Callable[[str], None]
) -> int:
    """Play tasks until the server says that the run is over; how many there were. A server that is gone is called again
    for `patience` seconds. Raises UsageError L11 where it refuses, PeerGone R03 where it does not come back,
    UserCodeError where numbers go bad or a client's steps raise."""
    played = 0
    while True:
        link = _joined(place, same)
        note(f"joined {place.where} with clients {place.clients}")
        try:
            for message in _messages(link, most):
                match message[0]["kind"]:
                    case "over":
                        return played
                    case "refused":
                        raise _refused(place, str(message[0].get("why"))[:500])
                    case "task":
                        _send(link, _played(host, task_of(message), link))
                        played += 1
                    case "secure":
                        _send(link, _replied(host, message, note))
        except (Broken, ValueError, KeyError, TypeError) as error:
            note(f"lost the server ({error}); calling again")
        finally:
            link.close()


def _played(host: ClientHost, task: Task, link: HostLink) -> Iterator[bytes]:
    """Whatever is raised here would be raised in the next round too: the server hears of it, and this process ends."""
    try:
        return answer_frames(host.play(task))
    except UnisonoError as error:
        _confess(link, error.what)
        raise
    except Exception as error:
        what = f"client {task.client}: {type(error).__name__}: {error}"
        _confess(link, what[:500])
        raise UserCodeError(what, where=f"round {task.number + 1}") from error


def _confess(link: HostLink, what: str) -> None:
    with suppress(Broken):  # what was raised counts for more than a server that has gone
        _send(link, frames_of({"kind": "failed", "what": what}, {}))


def _replied(host: ClientHost, message: Message, note: Callable[[str], None]) -> Iterator[bytes]:
    """A reply in a secure round. A client that does not go on leaves this round alone."""
    facts = message[0]
    client, number, step = int(facts["client"]), int(facts["number"]), str(facts["step"])
    request = request_of(step, facts, client + 1)
    try:
        return reply_frames(client, number, step, host.reply(client, number, request))
    except UsageError as error:
        note(
            f"round {number + 1} goes on without client {client}: {error.what} ({error.likely or error.fix})"
        )
        return reply_frames(client, number, step, error)


def _joined(place: JoinPlace, same: Mapping[str, Any]) -> HostLink:
    until, facts = (
        time.monotonic() + place.patience,
        {**same, "organisation": place.organisation, "clients": place.clients},
    )
    while True:
        try:
            return _called(place, dict(facts))
        except Refused as error:
            raise _refused(place, "it does not know this organisation, or not by this token") from error
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise _refused(place, f"TLS: {error}") from error
            if time.monotonic() > until:
                raise PeerGone(
                    f"no server answers at {place.where}: {error}",
                    where="unisono federate --join",
                    likely="it was not started, or it is over; or it cannot be reached from here",
                    fix="the address of unisono federate --serve",
                ) from error
            time.sleep(_AGAIN)


def _called(place: JoinPlace, facts: dict[str, Any]) -> HostLink:
    sock = socket.create_connection((place.address, place.port), _ANSWER)
    try:
        if place.tls is not None:
            sock = place.tls.wrap_socket(sock, server_hostname=place.address)
        return proven(sock, place.token, facts)
    except BaseException:
        sock.close()
        raise


def _messages(link: HostLink, most: int) -> Iterator[Any]:
    """What the server says, as it comes. Raises Broken, ValueError."""
    inbox = Inbox(most)
    while True:
        frames = link.receive()  # first: TLS may hold what the greeting has brought along
        for frame in frames:
            if (message := inbox.feed(frame)) is not None:
                yield message
        if not frames:
            select.select([link.sock], [], [])


def _send(link: HostLink, frames: Iterator[bytes]) -> None:
    for frame in frames:
        link.send(frame)
        while link.pay():
            select.select([], [link.sock], [])


def _refused(place: JoinPlace, why: str) -> UsageError:
    return UsageError(
        f"the server at {place.where} refuses {place.organisation}: {why}",
        where="unisono federate --join",
        likely="a wrong token or certificate, or a recipe that is not the server's",
        fix="ask who runs the server for the token, its certificate and the recipe",
        code="L11",
    )
