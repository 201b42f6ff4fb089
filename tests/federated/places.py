"""Servers and the processes of their clients, as threads of one process, each with a model of its own; the sockets are
real."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.federated.federations import federated, recipe_of
from unisono.train.data.dataset import Corpus
from unisono_contrib.federated.alike import alike, most_bytes
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer, ClientHost
from unisono_contrib.federated.joined import JoinPlace, serve
from unisono_contrib.federated.keep import ClientKeeper
from unisono_contrib.federated.organisations import Organisation
from unisono_contrib.federated.remote import RemoteClients, listen
from unisono_contrib.federated.secure.messages import Reply, Request
from unisono_contrib.federated.server import Federation, RunParts, client_host

KEYS = {"federated__clients": 5, "federated__participation": 0.6, "federated__rounds": 3}
TOKENS = {"milan": "m" * 20, "oslo": "o" * 20}
KNOWN = {name: Organisation(name, token) for name, token in TOKENS.items()}


class Place:
    """A server with its clients, before its first round."""

    def __init__(
        self, corpus: Corpus, tls: Any = None, patience: float = 30.0, known: Any = KNOWN, **keys: Any
    ) -> None:
        self.corpus, self.keys, self.notes = corpus, KEYS | keys, list[str]()
        self.outcomes: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self.port = 0

        def clients_of(parts: RunParts) -> RemoteClients:
            recipe = recipe_of(**self.keys).recipe
            same, most = alike(recipe, parts, corpus.fingerprint), most_bytes(parts)
            listener = listen("127.0.0.1", 0, known, same, 5, most, tls)
            self.port = listener.port
            return RemoteClients(listener, patience, self.notes.append, "digits/1")

        self.federation: Federation = federated(corpus, clients_of, **self.keys)
        self.clients: Any = self.federation.clients

    def join(
        self,
        name: str,
        clients: str,
        *,
        token: str = "",
        tls: Any = None,
        play: Any = None,
        reply: Any = None,
        state: Path | None = None,
        **keys: Any,
    ) -> None:
        """An organisation's process, as a thread. play(host, task): in the place of its local steps. reply(host,
        client, number, request): of what it replies in a secure round. state: folder for what its clients keep."""
        resolved = recipe_of(**self.keys | keys)
        parts = RunParts.of(resolved, self.corpus)
        host: Any = client_host(resolved, parts)
        host.keeper = ClientKeeper(state, self.notes.append) if host.keeps else None
        if play is not None or reply is not None:
            host = _Playing(host, play, reply)
        place = JoinPlace(
            "127.0.0.1", self.port, name, token or TOKENS.get(name, "?" * 20), clients, tls, 5.0
        )

        def body() -> None:
            same = alike(resolved.recipe, parts, self.corpus.fingerprint)
            try:
                self.outcomes[name] = serve(place, same, host, most_bytes(parts), self.notes.append)
            except BaseException as error:
                self.outcomes[name] = error

        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()

    def hear_until(self, is_over: Callable[[], bool]) -> None:
        """Listen, as a server does that waits for clients."""
        while not is_over():
            self.clients._turn(0.02)

    def end(self) -> None:
        self.federation.clients.close()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


class _Playing:
    def __init__(self, host: ClientHost, play: Any, reply: Any) -> None:
        self._host, self._play, self._reply = host, play, reply

    def play(self, task: Task) -> Answer:
        return self._host.play(task) if self._play is None else self._play(self._host, task)

    def reply(self, client: int, number: int, request: Request) -> Reply:
        if self._reply is None:
            return self._host.reply(client, number, request)
        return self._reply(self._host, client, number, request)


@contextmanager
def serving(corpus: Corpus, **options: Any) -> Iterator[Place]:
    place = Place(corpus, **options)
    try:
        yield place
    finally:
        place.end()
