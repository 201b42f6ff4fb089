"""The supervisor's answers to `unisono doctor hang RUN`: it asks each rank over the channel that it has. No torch.

A thread reads the question in the run folder and writes the answers, since a network file system may be slow. The
supervisor's own thread passes questions on to ranks and hears what they report.
"""

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from unisono.launch import inspect_folder
from unisono.launch.inspect_folder import InspectQuestion, Questions, RankProcess


class InspectedWorker(Protocol):
    """A rank's process as its supervisor sees it. number: the same as long as it lives, whatever its rank."""

    number: int

    def tell(self, kind: str, **fields: Any) -> None: ...


class InspectServer:
    """Answers for the ranks of a run, once they say in which folder. `fileno` is readable when `turn` has to be called.

    All methods are called by the supervisor's thread. workers: those that train, by rank.
    """

    def __init__(self) -> None:
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._folder: Path | None = None
        self._processes: dict[int, RankProcess] = {}  # by the number of their worker
        self._present: dict[int, RankProcess] = {}  # by rank, as they stand in the folder
        self._question = ""  # the last one
        self._answered = set[int]()  # ranks that have answered it
        self._questions: queue.SimpleQueue[tuple[InspectQuestion, bool]] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._woken.fileno()

    def heard(
        self, worker: InspectedWorker, event: Mapping[str, Any], workers: Mapping[int, InspectedWorker]
    ) -> bool:
        """Take in what a rank says. Returns whether it was for this server alone."""
        kind = event.get("kind")
        if kind == "appear" and (living := RankProcess.of(event.get("living") or {})) is not None:
            self._processes[worker.number] = living
            self._open(Path(str(event.get("folder"))))
        if kind in ("appear", "ready"):
            self._show(workers)
        if kind == "report":
            self._answer(next((rank for rank in workers if workers[rank].number == worker.number), -1), event)
        return kind in ("appear", "report")

    def turn(self, workers: Mapping[int, InspectedWorker]) -> None:
        """Pass on what is asked."""
        with suppress(BlockingIOError):
            self._woken.recv(64)
        while not self._questions.empty():
            question, again = self._questions.get()
            if not again:
                self._question, self._answered = question.token, set()
                for worker in workers.values():
                    worker.tell("report", token=question.token)
            elif self._folder is not None:
                self._look_at_silent(question, workers)

    def close(self) -> None:
        """Take the ranks away from the folder. Returns when that is done, or after some seconds."""
        if self._thread is not None and self._folder is not None:
            for living in self._present.values():
                self._write(inspect_folder.leave, self._folder, living)
            self._writes.put(None)
            self._thread.join(5.0)
        self._wakes.close()
        self._woken.close()

    def _open(self, folder: Path) -> None:
        if self._thread is None:
            self._folder = folder
            self._thread = threading.Thread(
                target=self._work, args=(folder,), name="unisono-inspect", daemon=True
            )
            self._thread.start()

    def _show(self, workers: Mapping[int, InspectedWorker]) -> None:
        """Put down who the ranks are by now."""
        if self._folder is None:
            return
        now = {
            rank: replace(living, rank=rank, world=len(workers))
            for rank, worker in workers.items()
            if (living := self._processes.get(worker.number)) is not None
        }
        for rank, living in self._present.items():
            if rank not in now:
                self._write(inspect_folder.leave, self._folder, living)
        for rank, living in now.items():
            if self._present.get(rank) != living:
                self._write(inspect_folder.appear, self._folder, living)
        self._present = now

    def _answer(self, by: int, event: Mapping[str, Any]) -> None:
        """What a rank reports, of itself or of its neighbour."""
        rank, token = event.get("rank", by), event.get("token")
        facts = {key: value for key, value in event.items() if key not in ("kind", "token", "rank")}
        if self._folder is not None and isinstance(rank, int) and token == self._question:
            self._answered.add(rank)
            self._write(inspect_folder.answer, self._folder, rank, self._question, facts)

    def _look_at_silent(self, question: InspectQuestion, workers: Mapping[int, InspectedWorker]) -> None:
        """Ranks that have not answered, and that who asks cannot see, are looked at from their own host."""
        for rank, living in self._present.items():
            if rank in self._answered or living.home == question.home:
                continue
            if living.is_here():
                self._write(self._look_at, living, question.token)
                continue
            beside = (
                other.rank for other in self._present.values()
                if other.home == living.home and other.rank in self._answered and other.rank in workers
            )  # fmt: skip
            if (neighbour := next(beside, None)) is not None:
                workers[neighbour].tell("report", token=question.token, about=asdict(living))

    # The thread that reads and writes the folder.

    def _write(self, work: Callable[..., object], *arguments: Any) -> None:
        self._writes.put(lambda: work(*arguments))

    def _look_at(self, living: RankProcess, token: str) -> None:
        if self._folder is not None:
            inspect_folder.answer(self._folder, living.rank, token, asdict(inspect_folder.seen(living)))

    def _work(self, folder: Path) -> None:
        questions = Questions(folder)
        while True:
            with suppress(queue.Empty, OSError):
                if (write := self._writes.get(timeout=questions.wait())) is None:
                    return
                write()
                continue
            if (news := questions.look()) is not None:
                self._questions.put(news)
                with suppress(OSError):  # it has been closed, or is full of such words
                    self._wakes.send(b"?")
