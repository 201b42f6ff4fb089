"""Samples read by data hosts: which ones is arithmetic here, so that any host, or this process, can read any of them.

The samples of a rank's leaves are divided among the hosts that live. What a host does not deliver is asked of another
one, or read here. A host that was lost is called again, by a thread beside.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.config import DataConfig
from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Corpus, Dataset, Foreseen, Uneven, fetched, numbers_at
from unisono.train.data.worker_pool import on_stderr, raised
from unisono_contrib.sync._servers import wire
from unisono_contrib.train.data.host_secret import PATIENCE, differing, secret_path, stranger, token_at
from unisono_contrib.train.data.host_words import facts_of, widened

_FIRST = 10.0  # seconds until all hosts have answered the first call, or count as lost
_AGAIN = 1.0  # seconds between two calls of a host that does not answer


@dataclass(slots=True)
class _CalledHost:
    """One host as a rank sees it. called: whether the first call is over. refusal: why it is of no use."""

    where: str
    connection: Connection | None = None
    refusal: UsageError | None = None
    called: threading.Event = field(default_factory=threading.Event)


_Asked = tuple[_CalledHost, Connection | None, int]  # a host, by which connection, the number of the request


class HostPool:
    """The hosts of one process: connected when samples are asked for the first time, and anew after a fork. Used by one
    thread at a time."""

    def __init__(self, places: Sequence[str], token: bytes, facts: Mapping[str, Any]) -> None:
        self._places, self._token, self._facts = places, token, facts
        self._hosts: list[_CalledHost] = []
        self._pid, self._number = -1, 0

    def living(self) -> list[_CalledHost]:
        """Those that answer now. Raises UsageError D20 for one that has other data or another secret."""
        if self._pid != os.getpid():
            self._pid, self._hosts = os.getpid(), [_CalledHost(place) for place in self._places]
            for host in self._hosts:
                self._call(host)
            for host in self._hosts:
                host.called.wait(_FIRST)
        for host in self._hosts:
            if host.refusal is not None:
                raise host.refusal
        return [host for host in self._hosts if host.connection is not None]

    def ask(self, host: _CalledHost, said: Mapping[str, Any], tensors: Sequence[Tensor]) -> _Asked:
        """Ask for samples, for `answer`; also of a host that is lost meanwhile."""
        self._number += 1
        connection = host.connection
        if connection is not None:
            try:
                connection.send_bytes(wire.packed({**said, "number": self._number}, tensors))
            except OSError as error:
                self._lose(host, error)
        return host, connection, self._number

    def answer(self, request: _Asked) -> list[Tensor] | None:
        """What a host has read; None where it is lost, or cannot. Raises UsageError D14, D19 and UserCodeError, as it
        does there."""
        host, connection, number = request
        while connection is not None and connection is host.connection:  # not a later one to the same host
            try:
                said, tensors = wire.unpacked(connection.recv_bytes())
            except (OSError, EOFError, ValueError) as error:
                self._lose(host, error)
                return None
            if said.get("number") != number or said.get("reads"):
                continue
            if "how" in said:
                return widened(said["how"], [x for x in tensors if x is not None])
            raised(said.get("failed", {}))
            return None
        return None

    def _lose(self, host: _CalledHost, error: Exception) -> None:
        if host.connection is not None:
            with suppress(OSError):
                host.connection.close()
        host.connection = None
        _note(host, error)
        self._call(host)

    def _call(self, host: _CalledHost) -> None:
        threading.Thread(target=self._call_on, args=(host,), name="unisono-calls", daemon=True).start()

    def _call_on(self, host: _CalledHost) -> None:
        """Until it answers, or turns out to be of no use."""
        address, _, port = host.where.rpartition(":")
        pause, has_begun = threading.Event(), host.called.is_set()
        while host.connection is None:
            refusal = None
            try:
                connection = wire.call(address.strip("[]"), int(port), self._token, {}, PATIENCE)
                said, _ = wire.unpacked(connection.recv_bytes())
                refusal = differing(host.where, self._facts, said.get("facts", {}))
                host.connection = connection if refusal is None else None
            except AuthenticationError:
                refusal = stranger(host.where)
            except (OSError, EOFError, ValueError) as error:
                if not host.called.is_set():
                    _note(host, error)
            if refusal is not None and has_begun:  # the run goes on without it
                on_stderr(f"data host {host.where} is not called any more: {refusal.what}\n")
                return
            host.refusal = refusal
            host.called.set()
            if refusal is not None:
                return
            if host.connection is None:
                pause.wait(_AGAIN)
        if has_begun:
            on_stderr(f"data host {host.where} reads again\n")


def _note(host: _CalledHost, error: Exception) -> None:
    why = str(error) or type(error).__name__
    on_stderr(f"data host {host.where} does not answer ({why}): its samples are read by others, or here\n")


@dataclass(slots=True)
class HostedDataset:
    """A dataset of which hosts read the samples. inner: the same, read here where no host does. name: "train" or "val".
    begin: of what is asked for next, so that hosts read ahead."""

    inner: Dataset
    name: str
    pool: HostPool
    _begin: int = 0
    _documents: tuple[np.ndarray, Tensor] | None = None

    is_slow = True

    def __len__(self) -> int:
        return len(self.inner)

    def numbers_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        """The samples at these positions, int64 [n], as without hosts."""
        return numbers_at(self.inner, seed, positions)

    def expect(self, seed: int, position: int) -> None:
        """Hosts hear of it with the next samples that are asked of them."""
        self._begin = position

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As the dataset's, read here: a sample outside of the order is asked for to see its shape."""
        return self.inner.fetch(indices)

    def fetch_at(self, seed: int, positions: np.ndarray, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """As the dataset's, read by hosts. Raises UsageError, D20 among them, and UserCodeError."""
        hosts = self.pool.living()
        cuts = np.array_split(np.arange(len(indices)), max(1, len(hosts)))
        pairs = [(positions[rows], indices[rows]) for rows in cuts if len(rows)]
        requests = [self._ask(host, seed, *pair) for host, pair in zip(hosts, pairs, strict=False)]
        read: list[list[Tensor] | None] = [self.pool.answer(request) for request in requests]
        read += [None] * (len(pairs) - len(read))
        whole = [
            self._elsewhere(seed, *pair) if tensors is None else tensors
            for pair, tensors in zip(pairs, read, strict=True)
        ]
        inputs, targets, *documents = (torch.cat(each) for each in zip(*whole, strict=True))
        self._documents = (indices, documents[0]) if documents else None
        return inputs, targets

    def _ask(self, host: _CalledHost, seed: int, positions: np.ndarray, indices: np.ndarray) -> _Asked:
        said = {"set": self.name, "seed": seed, "begin": self._begin}
        return self.pool.ask(host, said, [torch.from_numpy(np.array(x)) for x in (positions, indices)])

    def _elsewhere(self, seed: int, positions: np.ndarray, indices: np.ndarray) -> list[Tensor]:
        """By another host, or here."""
        for host in self.pool.living():
            read = self.pool.answer(self._ask(host, seed, positions, indices))
            if read is not None:
                return read
        if isinstance(self.inner, Foreseen):
            self.inner.expect(seed, self._begin)
        documents = self.inner.documents(indices) if isinstance(self.inner, Uneven) else None
        read = fetched(self.inner, seed, positions, indices)
        return [*read] if documents is None else [*read, documents]

    def counted(self, indices: np.ndarray) -> np.ndarray | None:
        """As the dataset's."""
        return self.inner.counted(indices) if isinstance(self.inner, Uneven) else None

    def documents(self, indices: np.ndarray) -> Tensor | None:
        """As the dataset's; hosts send them with the samples."""
        if self._documents is not None and np.array_equal(self._documents[0], indices):
            return self._documents[1]
        return self.inner.documents(indices) if isinstance(self.inner, Uneven) else None


def hosted(corpus: Corpus, data: DataConfig) -> Corpus:
    """The same samples, read by `data.hosts`. Calls nobody yet, so that a fork may follow. Raises UsageError D20 where
    there is no secret."""
    token, facts = token_at(secret_path(data)), facts_of(corpus, data)
    train, val = (
        HostedDataset(each, name, HostPool(data.hosts, token, facts))
        for each, name in ((corpus.train, "train"), (corpus.val, "val"))
    )
    return replace(corpus, train=train, val=val)
