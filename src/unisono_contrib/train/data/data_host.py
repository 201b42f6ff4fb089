"""A data host: a process that reads, decodes and tokenises a recipe's data, and serves samples by number to ranks.

It keeps no position and knows no rank. Whoever asks says which samples, so that it makes no difference which host is
asked, or how often.
"""

import json
import socket
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.spec.errors import UsageError, UserCodeError
from unisono.train.data import cache
from unisono.train.data.dataset import Corpus, Foreseen, Uneven, fetched
from unisono.train.data.worker_pool import failure
from unisono_contrib.sync._servers import wire
from unisono_contrib.train.data.host_words import BEAT, narrowed
from unisono_contrib.train.data.stream.index import KIND as INDEX

_MOST = 1024  # callers at once
_OF_DATA = ("D14", "D19")  # errors that any other process would meet too
_LOOK = 0.5  # seconds between two looks for the end


class DataHost:
    """Serves from now on, on threads. samples: that it has served. facts: see `facts_of`. cache: of its data, where the
    index of shards lies."""

    def __init__(
        self, listener: socket.socket, token: bytes, corpus: Corpus, facts: Mapping[str, Any], cache: str
    ) -> None:
        self._cache = cache
        self.samples, self._facts, self._token = 0, dict(facts), token
        self._sets = {"train": corpus.train, "val": corpus.val}
        self._listener, self._over = listener, threading.Event()
        self._lock, self._callers = threading.Lock(), set[Connection]()
        self._readers = ThreadPoolExecutor(thread_name_prefix="unisono-read")
        threading.Thread(target=self._accept, name="unisono-data-host", daemon=True).start()

    @property
    def port(self) -> int:
        """That it listens at."""
        return self._listener.getsockname()[1]

    def wait(self) -> None:
        """Until `close`, or Ctrl-C."""
        while not self._over.wait(_LOOK):
            pass

    def close(self) -> None:
        """Callers read for themselves from here on."""
        self._over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._callers:
                wire.hang_up(connection)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._over.wait(_LOOK):  # no descriptor is free now
                    continue
                return
            if threading.active_count() > _MOST:
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="unisono-caller", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            connection, _ = wire.answer(sock, self._token)
        except (OSError, EOFError, AuthenticationError, ValueError):
            return
        with self._lock:
            self._callers.add(connection)
        try:
            for word in ({}, {"facts": self._facts}):  # a welcome, which `wire.call` waits for
                connection.send_bytes(wire.packed(word))
            while not self._over.is_set():
                said, tensors = wire.unpacked(connection.recv_bytes())
                if "index" in said:
                    connection.send_bytes(wire.packed(*self._index(said["index"])))
                else:
                    self._reply(connection, said, tensors)
        except (OSError, EOFError, ValueError):
            pass  # the rank has ended, or what came was from no rank
        finally:
            with self._lock:
                self._callers.discard(connection)
            connection.close()

    def _reply(self, connection: Connection, said: Mapping[str, Any], tensors: list[Tensor | None]) -> None:
        try:
            number, reading = said.get("number"), self._readers.submit(self._read, said, tensors)
        except RuntimeError as error:  # it is closing
            raise EOFError from error
        while not _is_done(reading):
            connection.send_bytes(wire.packed({"number": number, "reads": True}))
        try:
            how, read = reading.result()
            connection.send_bytes(wire.packed({"number": number, "how": how}, read))
            with self._lock:
                self.samples += len(read[0])
        except CancelledError as error:
            raise EOFError from error
        except UserCodeError as error:
            connection.send_bytes(wire.packed({"number": number, "failed": failure(error)}))
        except Exception as error:
            is_theirs = isinstance(error, UsageError) and error.code in _OF_DATA
            if not is_theirs:  # who asked may read them elsewhere
                traceback.print_exception(error)
            answer = failure(error) if is_theirs else {}
            connection.send_bytes(wire.packed({"number": number, "failed": answer}))

    def _index(self, key: Mapping[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """What it knows of a shard, which ranks need not read then."""
        folder = cache.folder_of(self._cache, INDEX, key)
        if not (folder / cache.META).exists():
            return {"meta": None}, []
        paths = sorted(path for path in folder.iterdir() if path.name != cache.META)
        bodies = [torch.from_numpy(np.fromfile(path, np.uint8)) for path in paths]
        meta = json.loads((folder / cache.META).read_text())
        return {"meta": meta, "files": [path.name for path in paths]}, bodies

    def _read(self, said: Mapping[str, Any], tensors: list[Tensor | None]) -> tuple[list[str], list[Tensor]]:
        """(how they are made whole, inputs and targets, and documents if there are several in a window)."""
        dataset, seed = self._sets[said["set"]], said["seed"]
        positions, numbers = (np.asarray(x) for x in tensors)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(dataset):
            raise ValueError(f"samples {numbers.min()} to {numbers.max()} of {len(dataset)}")
        if isinstance(dataset, Foreseen):
            dataset.expect(seed, said["begin"])
        whole = [*fetched(dataset, seed, positions, numbers)]
        documents = dataset.documents(numbers) if isinstance(dataset, Uneven) else None
        return narrowed(whole if documents is None else [*whole, documents])


def _is_done(reading: "Future[Any]") -> bool:
    try:
        reading.exception(BEAT)
    except TimeoutError:
        return reading.done()
    except CancelledError:
        return True
    return True
