"""Clients in other processes, as the server sees them: over links that are proven by a token, and lost with them."""

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.launch.host_listener import MOST_PENDING, HostListener
from unisono.launch.link import Broken, HostLink, Refused
from unisono.spec.errors import HangError, UsageError
from unisono.spec.words import listed
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer, Clients
from unisono_contrib.federated.messages import (
    Inbox,
    SecureReply,
    answer_of,
    frames_of,
    request_frames,
    secure_reply_of,
    task_frames,
)
from unisono_contrib.federated.organisations import Organisation, numbers_in
from unisono_contrib.federated.secure.frames import step_of
from unisono_contrib.federated.secure.messages import Reply, Request

_LOOK, _FAREWELL = 0.5, 5.0  # seconds
HEARD = "heard"


@dataclass(slots=True, eq=False)
class ClientProcess:
    """A process of an organisation, with its clients. silent: it did not answer in time, and has said nothing since."""

    organisation: str
    clients: tuple[int, ...]
    link: HostLink
    inbox: Inbox
    silent: bool = False


@dataclass
class FederationListener(HostListener):
    """Admits processes of organisations, each by its organisation's token. same: what they must be alike in, by name.
    count: clients of the run. most: bytes of an answer."""

    organisations: Mapping[str, Organisation] = field(default_factory=dict)
    same: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0
    most: int = 0

    def _token_of(self, answered: dict[str, Any]) -> str:
        organisation = self.organisations.get(str(answered.get("organisation"))[:100])
        if organisation is None:
            raise Refused("an organisation that is not known here")
        return organisation.token

    def _member(self, facts: dict[str, Any], host_link: HostLink, address: str) -> Any:
        """Whoever it is knows the token: what does not fit is said to it before the link ends."""
        organisation = self.organisations[str(facts["organisation"])]
        member = ClientProcess(organisation.name, (), host_link, Inbox(self.most))
        try:
            clients = tuple(numbers_in(str(facts.get("clients")), "--clients"))
        except UsageError as error:
            return self._turned_away(member, error.what)
        differ = [name for name, value in self.same.items() if facts.get(name) != value]
        if differ:
            return self._turned_away(member, f"its {listed(differ, 3)} differ from the server's")
        if clients[-1] >= self.count:
            return self._turned_away(member, f"there is no client {clients[-1]} among {self.count}")
        if organisation.clients is not None and (more := sorted({*clients} - organisation.clients)):
            return self._turned_away(member, f"client {more[0]} is not {organisation.name}'s")
        member.clients = clients
        return member

    def _turned_away(self, member: ClientProcess, why: str) -> None:
        for frame in frames_of({"kind": "refused", "why": why}, {}):
            member.link.send(frame)
        member.link.close()
        self.refused(f"{member.organisation} was refused: {why}")


class RemoteClients(Clients):
    """Clients that join by themselves and may leave at any time. One that has gone, or does not answer within
    `patience` seconds of being asked, has dropped out of its task, or of its secure round. When all have gone, they are
    waited for so long.

    note(text): for people. run: by which clients know what they keep for it, the same when it is resumed. Raises
    HangError H01 in `wait_for` and `start`.
    """

    def __init__(
        self, listener: FederationListener, patience: float, note: Callable[[str], None], run: str = ""
    ) -> None:
        self._listener, self._patience, self._note, self._run = listener, patience, note, run
        self._heard: dict[int, int] = {}  # by client: number of its last answer
        self._members: dict[int, ClientProcess] = {}  # by client
        self._answers: dict[int, Answer] = {}
        self._open: dict[int, tuple[int, float]] = {}  # by client: number of its task, and when it was sent
        self._awaited: dict[int, tuple[int, str]] = {}  # by client: round and step of what it has to reply to
        self._replies: dict[int, Reply] = {}
        self._refusal: UsageError | None = None
        self._over = False
        listener.refused = note

    def wait_for(self, count: int, patience: float) -> None:
        """Wait until so many clients have joined."""
        until = time.monotonic() + patience
        while len(self._members) < count:
            if time.monotonic() > until:
                raise HangError(
                    f"{len(self._members)} of {count} clients have joined in {patience:.0f} s",
                    where="unisono federate --serve",
                    likely="organisations that were not started, that were refused, or whose clients have failed",
                    fix="unisono federate FILE --join on their hosts, or --expect with fewer",
                )
            self._turn(_LOOK)

    def start(self, task: Task) -> None:
        self._turn(0.0)
        if not self._members:
            self._note("all clients have gone: waiting for one")
            self.wait_for(1, self._patience)
        member = self._members.get(task.client)
        self._answers.pop(task.client, None)
        if member is None or member.silent:
            self._open.pop(task.client, None)
            return
        self._open[task.client] = (task.number, time.monotonic())
        heard = self._heard.get(task.client, -1)
        self._send(member, task_frames(replace(task, run=self._run, heard=heard)))

    def finish(self, task: Task) -> Answer | None:
        number, since = self._open.get(task.client, (-1, 0.0))
        while number == task.number and task.client in self._members and task.client not in self._answers:
            if (left := since + self._patience - time.monotonic()) <= 0.0:
                self._members[task.client].silent = True
                self._note(f"client {task.client} has not answered in {self._patience:g} s, and drops out")
                return None
            self._turn(min(_LOOK, left))
        answer = self._answers.pop(task.client, None)
        if answer is not None:
            self._heard[task.client] = answer.number
        return answer

    def state(self) -> dict[str, Tensor]:
        return {f"{client}/{HEARD}": torch.tensor(number) for client, number in self._heard.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        parts = {key.partition("/")[::2]: x for key, x in state.items()}
        self._heard = {int(client): int(x) for (client, name), x in parts.items() if name == HEARD}

    def exchange(self, number: int, requests: Mapping[int, Request]) -> dict[int, Reply]:
        self._awaited, self._replies, self._refusal = {}, {}, None
        self._turn(0.0)
        for client, request in requests.items():
            member = self._members.get(client)
            if member is not None and not member.silent:
                self._awaited[client] = (number, step_of(request))
                self._send(member, request_frames(client, number, request))
        until = time.monotonic() + self._patience
        while self._awaited and (left := until - time.monotonic()) > 0.0:
            self._turn(min(_LOOK, left))
            if self._refusal is not None:
                raise self._refusal
        for client, (_, step) in self._awaited.items():
            self._members[client].silent = True
            self._note(f"client {client} does not {step} in {self._patience:g} s, and drops out")
        return {client: self._replies[client] for client in requests if client in self._replies}

    def reject(self, client: int, why: str) -> None:
        if (member := self._members.get(client)) is not None:
            self._turn_away(member, why)

    def close(self) -> None:
        """The run is over. Clients leave by themselves: a link that ends with words of theirs unread would take ours
        along."""
        self._over = True
        members = {id(member): member for member in self._members.values()}.values()
        for member in members:
            self._send(member, frames_of({"kind": "over"}, {}))
        until = time.monotonic() + _FAREWELL
        while any(not member.silent for member in self._members.values()) and time.monotonic() < until:
            self._turn(0.05)
        for member in members:
            member.link.close()
        self._listener.close()

    def _turn(self, seconds: float) -> None:
        """Hear who has something to say, for so many seconds at most."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, self._admit)
            for member in {id(member): member for member in self._members.values()}.values():
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.link.owed else 0)
                selector.register(member.link.sock, events, partial(self._hear, member))
            for key, _ in selector.select(seconds):
                key.data()
        self._listener.expire()

    def _admit(self) -> None:
        for member in self._listener.turn():
            if member is None:
                continue
            for client in member.clients:
                if (before := self._members.get(client)) is not None:
                    self._lose(before, "it has joined again")
            self._members |= dict.fromkeys(member.clients, member)
            self._note(f"{member.organisation} has joined with clients {_ranges(member.clients)}")

    def _hear(self, member: ClientProcess) -> None:
        try:
            member.link.pay()
            for frame in member.link.receive():
                if (message := member.inbox.feed(frame)) is not None:
                    self._take(member, message)
        except Broken as error:
            self._lose(member, str(error))
        except (ValueError, KeyError, TypeError) as error:
            self._turn_away(member, f"what it sends is no message of this run: {error}")

    def _turn_away(self, member: ClientProcess, why: str) -> None:
        """Say why before the link ends, so that its process ends too and does not come again with the same."""
        self._send(member, frames_of({"kind": "refused", "why": why}, {}))
        self._lose(member, why)

    def _take(self, member: ClientProcess, message: Any) -> None:
        """An answer in time; what comes later than that is not counted, and shows that its client lives."""
        member.silent = False
        if message[0]["kind"] == "failed":
            self._lose(member, str(message[0].get("what"))[:500])
            return
        if message[0]["kind"] == "secure":
            self._take_reply(member, secure_reply_of(message))
            return
        answer = answer_of(message)
        if answer.client not in member.clients:
            raise ValueError(f"an answer for client {answer.client}")
        if self._open.get(answer.client, (-1,))[0] == answer.number:
            self._answers[answer.client] = answer

    def _take_reply(self, member: ClientProcess, came: SecureReply) -> None:
        """One that is not waited for any more is not counted. Who refuses by itself is a drop-out; a number beyond the
        limit loses the round, since a sum without it would look like a right one."""
        if came.client not in member.clients:
            raise ValueError(f"a reply for client {came.client}")
        if self._awaited.get(came.client) != (came.number, came.step):
            return
        del self._awaited[came.client]
        code, why = came.refused
        if came.reply is not None:
            self._replies[came.client] = came.reply
        elif code == "A01":
            fix = "a larger federated.secure_limit, or bound deltas by [privacy] clip"
            self._refusal = UsageError(why, where="federated.secure_limit", fix=fix, code=code)
        else:
            self._note(f"client {came.client} leaves round {came.number + 1}: {why}")

    def _send(self, member: ClientProcess, frames: Iterator[bytes]) -> None:
        try:
            for frame in frames:
                member.link.send(frame)
        except Broken as error:
            self._lose(member, str(error))

    def _lose(self, member: ClientProcess, why: str) -> None:
        if self._members.get(member.clients[0]) is not member:
            return
        for client in member.clients:
            self._members.pop(client, None)
            self._open.pop(client, None)  # who joins in its place knows nothing of its task
            self._awaited.pop(client, None)
        member.link.close()
        if not self._over:
            self._note(f"{member.organisation} has left with clients {_ranges(member.clients)}: {why}")


def listen(
    address: str,
    port: int,
    organisations: Mapping[str, Organisation],
    same: Mapping[str, Any],
    count: int,
    most: int,
    tls: ssl.SSLContext | None,
) -> FederationListener:
    """At an address of this host; port 0: any that is free. Raises UsageError L01."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=MOST_PENDING)
    except OSError as error:
        what = f"cannot listen at {address}:{port}: {error.strerror or error}"
        raise UsageError(
            what, where="--serve", fix="an address of this host, and a free port", code="L01"
        ) from error
    return FederationListener(
        "", address, listener, tls=tls, organisations=organisations, same=same, count=count, most=most
    )


def _ranges(clients: tuple[int, ...]) -> str:
    """[0, 1, 2, 7] is `0-2,7`."""
    parts: list[list[int]] = []
    for client in clients:
        if parts and parts[-1][-1] == client - 1:
            parts[-1].append(client)
        else:
            parts.append([client])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
