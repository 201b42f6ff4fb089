"""Simulated clients in several processes of this host, one for each core that is to work.

The processes are forked from the server's when it has built the model, so that they have its data without a copy. A
process that is idle takes the task with the most samples. What clients keep travels with their tasks. So the bits are
those of one process, whoever trains which client.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from torch import Tensor

from unisono.spec.errors import PeerGone, UnisonoError, UserCodeError
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer, ClientHost, SimulatedClients
from unisono_contrib.federated.messages import (
    Inbox,
    Message,
    answer_frames,
    answer_of,
    frames_of,
    task_frames,
    task_of,
)

KEPT = "kept/"
_MOST = 1 << 40  # bytes of a message: who sends it is this program


@dataclass(slots=True, eq=False)
class ClientWorker:
    """A process that trains clients. task: under way."""

    process: BaseProcess
    pipe: Connection
    task: Task | None = None


class WorkerClients(SimulatedClients):
    """All clients of a run in `count` processes. Raises UserCodeError where a client's numbers go bad, PeerGone R03
    where a process has gone. Fork before anything has computed with several threads."""

    def __init__(self, host: ClientHost, count: int) -> None:
        super().__init__(host)
        self._waiting: list[Task] = []
        self._workers: list[ClientWorker] = []
        fork = multiprocessing.get_context("fork")
        for _ in range(count):
            ours, theirs = fork.Pipe()
            foreign = [ours, *(worker.pipe for worker in self._workers)]
            process = fork.Process(target=_work, args=(host, theirs, foreign), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(ClientWorker(process, ours))

    def start(self, task: Task) -> None:
        self._waiting.append(task)

    def finish(self, task: Task) -> Answer | None:
        while task.client not in self._answers:
            self._turn()
        return super().finish(task)

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(5.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _turn(self) -> None:
        """Give idle processes their tasks, and wait for an answer."""
        for worker in self._workers:
            if worker.task is None and self._waiting:
                self._waiting.sort(key=lambda task: len(self._host.parts[task.client]))
                self._give(worker, self._waiting.pop())
        busy = [worker for worker in self._workers if worker.task is not None]
        ready = wait([worker.pipe for worker in busy])
        for worker in busy:
            if worker.pipe in ready:
                self._take(worker)

    def _give(self, worker: ClientWorker, task: Task) -> None:
        worker.task = task
        kept = {f"{KEPT}{name}": x for name, x in self._host.kept_of(task).items()}
        try:
            for frame in (*task_frames(task), *frames_of({"kind": "kept"}, kept)):
                worker.pipe.send_bytes(frame)
        except OSError as error:
            raise _gone(worker) from error

    def _take(self, worker: ClientWorker) -> None:
        try:
            answered = _message(worker.pipe)
            if answered[0]["kind"] == "failed":
                facts = answered[0]
                raise UserCodeError(facts["what"], **facts["more"])
            kept = _message(worker.pipe)[1]
        except (EOFError, OSError) as error:
            raise _gone(worker) from error
        answer, worker.task = answer_of(answered), None
        self._host.kept[answer.client] = {name.removeprefix(KEPT): x for name, x in kept.items()}
        self._answers[answer.client] = self._host.hidden(answer)


def _gone(worker: ClientWorker) -> PeerGone:
    worker.process.join(1.0)
    code = worker.process.exitcode
    return PeerGone(
        f"a process of simulated clients has gone (exit code {code})",
        where="unisono federate --workers",
        likely="it was killed, as for want of memory: each process has a model of its own",
        fix="fewer --workers",
    )


def _message(pipe: Connection) -> Message:
    """Raises EOFError where the other side has gone."""
    inbox = Inbox(_MOST)
    while (message := inbox.feed(pipe.recv_bytes())) is None:
        pass
    return message


def _played(host: ClientHost, task: Task, kept: dict[str, Tensor]) -> list[bytes]:
    """The frames of an answer and of what its client keeps, or of what was raised."""
    host.kept[task.client] = kept
    try:
        answer = host.play(task)
    except UnisonoError as error:
        more = {name: getattr(error, name) for name in ("where", "likely", "fix", "code")}
        return [*frames_of({"kind": "failed", "what": error.what, "more": more}, {})]
    except Exception as error:
        what = f"client {task.client}: {type(error).__name__}: {error}"
        return [
            *frames_of({"kind": "failed", "what": what, "more": {"where": f"round {task.number + 1}"}}, {})
        ]
    return [
        *answer_frames(answer),
        *frames_of({"kind": "kept"}, {f"{KEPT}{name}": x for name, x in kept.items()}),
    ]


def _work(host: ClientHost, pipe: Connection, foreign: Iterable[Connection]) -> None:
    """In the process: play tasks until the server's process closes the line, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the server's process ends this one
    for other in foreign:
        other.close()
    host.secure = None  # the server's process, which has all deltas anyway, plays that part
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = task_of(_message(pipe))
            kept = {name.removeprefix(KEPT): x for name, x in _message(pipe)[1].items()}
            for frame in _played(host, task, kept):
                pipe.send_bytes(frame)
    os._exit(0)
