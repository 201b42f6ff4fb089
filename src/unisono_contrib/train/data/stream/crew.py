"""Worker processes that prepare samples while a run trains: started when there is work, used by any thread, ended with
this process. No torch."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np

from unisono.spec.errors import UnisonoError
from unisono.train.data.tokenised.chats import BadRecord
from unisono.train.data.worker_pool import DataWorker, end, start
from unisono_contrib.comm.depot import bare
from unisono_contrib.train.data.stream.decode import Decoding, Draw
from unisono_contrib.train.data.stream.store import damaged

_MODULE = "unisono_contrib.train.data.stream.preparing"


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture to be decoded. shard, at: where its bytes stand. read(): they. draw: of its visit."""

    shard: str
    at: int
    read: Callable[[], bytes]
    draw: Draw | None

    @property
    def place(self) -> str:
        """SHARD:BYTE."""
        return f"{bare(self.shard)}:{self.at}"


class _Workers:
    """The processes of one process. A fork has none of its parent's."""

    def __init__(self, count: int) -> None:
        self.pid = os.getpid()
        self.files = [os.memfd_create("unisono-pixels", os.MFD_CLOEXEC) for _ in range(count)]
        self.every: list[DataWorker] = []
        self.idle: SimpleQueue[tuple[DataWorker, int]] = SimpleQueue()
        weakref.finalize(self, _close, self.pid, self.every, self.files)
        for file in self.files:
            self.every.append(start(_MODULE, (file,)))
            self.idle.put((self.every[-1], file))


def _close(pid: int, workers: list[DataWorker], files: list[int]) -> None:
    if pid == os.getpid():
        end(workers)
        for file in files:
            os.close(file)


@dataclass(slots=True)
class WorkerCrew:
    """count: processes. One that dies ends them all; who asks again gets new ones."""

    count: int
    _workers: _Workers | None = None
    _lock: Lock = field(default_factory=Lock)

    def decoded(self, pictures: Sequence[EncodedPicture], decoding: Decoding) -> np.ndarray:
        """[n, C, H, W] of `Decoding.dtype`. Raises UsageError D10, D14, D16 where the process has died,
        UserCodeError."""
        bodies = [each.read() for each in pictures]
        order = {
            "shape": decoding.shape,
            "transform": decoding.transform,
            "sizes": [len(body) for body in bodies],
            "draws": [each.draw for each in pictures],
            "files": [each.place for each in pictures],
        }
        pixels = np.empty((len(pictures), *decoding.shape), dtype=decoding.dtype)
        answer = self.call(order, b"".join(bodies), pixels=pixels)
        if answer["bad"] is not None:
            row, why = answer["bad"]
            raise damaged(pictures[row].shard, pictures[row].at, why)
        return pixels

    def call(
        self, order: Mapping[str, Any], body: bytes, out: str = "", pixels: np.ndarray | None = None
    ) -> dict[str, Any]:
        """The answer to an order, after waiting for it. out: where the worker writes. pixels: gets what it writes to
        its file. Raises as `DataWorker.heard`."""
        workers = self._started()
        worker, file = workers.idle.get()
        try:
            worker.ask({**order, "bytes": len(body), "pixels": file}, body)
            while not (answers := worker.heard(out)):
                pass
            if pixels is not None and answers[0]["bad"] is None:
                _read(file, pixels.reshape(-1).view(np.uint8).data)
            return answers[0]
        except (UnisonoError, OSError):
            raise
        except BaseException:  # its answer would be taken for that of another order
            worker.process.kill()
            worker.process.wait()
            raise
        finally:
            if worker.process.poll() is not None:
                with self._lock:
                    self._workers = None
            workers.idle.put((worker, file))

    def _started(self) -> _Workers:
        with self._lock:
            if self._workers is None or self._workers.pid != os.getpid():
                self._workers = _Workers(self.count)
            return self._workers


@dataclass(slots=True)
class PictureDecoder:
    """threads: that decode, or, where there is a crew, that wait for its processes."""

    decoding: Decoding
    threads: int
    crew: WorkerCrew | None = None
    _pool: ThreadPoolExecutor | None = None
    _lock: Lock = field(default_factory=Lock)

    def decoded(self, pictures: Sequence[EncodedPicture]) -> np.ndarray:
        """[n, C, H, W] of `Decoding.dtype`. Raises UsageError, and UserCodeError where the user's function raises."""
        pixels = np.empty((len(pictures), *self.decoding.shape), dtype=self.decoding.dtype)
        looks = len(pictures) == 1 and pictures[0].draw is None  # for its shape: a fork may follow
        crew = None if looks else self.crew
        pieces = max(1, 2 * self.threads) if crew else len(pictures)
        cuts = np.linspace(0, len(pictures), min(pieces, len(pictures)) + 1).astype(int).tolist()

        def decode(rows: slice) -> None:
            chosen = pictures[rows]
            pixels[rows] = crew.decoded(chosen, self.decoding) if crew else self._here(chosen)

        chunks = [slice(*pair) for pair in pairwise(cuts)]
        if self.threads > 1 and len(chunks) > 1:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="unisono-decode")
            list(self._pool.map(decode, chunks))
        else:
            for rows in chunks:
                decode(rows)
        return pixels

    def _here(self, pictures: Sequence[EncodedPicture]) -> list[np.ndarray]:
        try:
            return [self.decoding.pixels((at := each).read(), each.draw, each.place) for each in pictures]
        except BadRecord as error:
            raise damaged(at.shard, at.at, str(error)) from error


def _read(file: int, into: memoryview) -> None:
    at = 0
    while at < len(into):
        at += os.preadv(file, [into[at:]], at)
