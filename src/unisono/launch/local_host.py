"""This host: its fork server, and the workers that it has forked. No torch.

A supervisor uses it for its own host, an agent for the host that it lends. `remote_host` is the same seen from afar.
Commands and reports are JSON objects with an `op`:

    to it     run, spawn (with the worker's ends of its lines), kill, end
    from it   imported, prepared, failed, born, exit, stopped, gone
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from unisono.launch import wire
from unisono.launch.malloc_tuning import with_huge_pages
from unisono.launch.rank_status import process_state
from unisono.launch.run.verdict import how_died

LOOK_EVERY = 0.2
"""Seconds between two looks at whether workers are stopped by a signal."""
Message = dict[str, Any]


class WorkerHost(Protocol):
    """Where workers of a run can be. room: how many it takes. rate: bit/s of the link to it, 0 where nobody has
    measured. delay: seconds of a small message to it."""

    name: str
    room: int
    cores: int
    address: str

    @property
    def rate(self) -> float: ...

    @property
    def delay(self) -> float: ...

    def fileno(self) -> int:
        """Readable when `poll` has something to report."""
        ...

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Give it a command; the files stay the caller's. One that is gone does not mind: `poll` reports that."""
        ...

    def poll(self) -> list[Message]:
        """What it reports, without waiting; `gone` comes last."""
        ...

    def next_poll(self) -> float | None:
        """When `poll` has something to do in any case, by the monotonic clock."""
        ...

    def close(self) -> None: ...


class ServerProcess(Protocol):
    """The process of a fork server, as `subprocess.Popen` shows it."""

    pid: int

    def kill(self) -> None: ...

    def wait(self) -> int: ...


@dataclass
class _Process:
    pid: int
    pidfd: int  # by which the kernel knows it, whoever gets its number afterwards
    stopped: bool = False


@dataclass
class LocalHost:
    """control: the line to its fork server, whose process is `server`."""

    name: str
    room: int
    cores: int
    control: socket.socket
    server: ServerProcess
    address: str = ""
    rate = delay = 0.0
    _workers: dict[int, _Process] = field(default_factory=dict)
    _looked: float = 0.0
    _how_gone: str = ""

    @classmethod
    def start(cls, name: str, room: int, entry: str, path: Sequence[str] = ()) -> "LocalHost":
        """Its fork server imports from now on."""
        return cls(name, room, cores(), *start_fork_server(entry, path))

    def fileno(self) -> int:
        return self.control.fileno()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        match message["op"]:
            case "kill":
                if (process := self._workers.get(message["worker"])) is not None:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process.pidfd, message["signal"])
            case "end":
                self.server.kill()
            case "probe":
                pass  # there is no link
            case _:
                with suppress(OSError):  # its fork server has gone
                    wire.send_message(self.control, message, files)

    def poll(self) -> list[Message]:
        reports = list[Message]()
        while not self._how_gone and self._is_readable():
            reports += self._read()
        if self._how_gone:
            return [*reports, {"op": "gone", "how": self._how_gone}]
        if self._workers and time.monotonic() - self._looked >= LOOK_EVERY:
            reports += self._look()
        return reports

    def _is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return bool(poll.poll(0))

    def next_poll(self) -> float | None:
        return self._looked + LOOK_EVERY if self._workers else None

    def _read(self) -> list[Message]:
        """The next message of the fork server."""
        try:
            received = wire.read_message(self.control)
        except OSError:
            received = None
        if received is None:
            self._how_gone = how_died(self.server.wait())
            self._await_workers()
            return []
        message, files = received
        match message["op"]:
            case "born":
                self._workers[message["worker"]] = _Process(message["pid"], files[0])
            case "exit":
                if (process := self._workers.pop(message["worker"], None)) is not None:
                    os.close(process.pidfd)
            case _:
                pass
        return [message]

    def _await_workers(self) -> None:
        """Workers die with their fork server: return when the kernel says that they have. `gone` tells of all."""
        for process in self._workers.values():
            poll = select.poll()
            poll.register(process.pidfd, select.POLLIN)
            poll.poll()
            os.close(process.pidfd)
        self._workers.clear()

    def _look(self) -> list[Message]:
        """Workers that a signal has stopped, or that go on."""
        self._looked, reports = time.monotonic(), list[Message]()
        for number, process in self._workers.items():
            if (stopped := process_state(process.pid) == "T") != process.stopped:
                process.stopped = stopped
                reports.append({"op": "stopped", "worker": number, "stopped": stopped})
        return reports

    def kill_all(self) -> None:
        """Send SIGKILL to all workers that live."""
        for number in self._workers:
            self.send({"op": "kill", "worker": number, "signal": signal.SIGKILL})

    def is_empty(self) -> bool:
        """Whether no worker lives here, as far as the fork server has said."""
        return not self._workers

    def close(self) -> None:
        """End the fork server, and with it all workers; harmless when repeated."""
        self.control.close()
        self.server.kill()
        self.server.wait()
        for process in self._workers.values():
            os.close(process.pidfd)
        self._workers.clear()


def start_fork_server(
    entry: str, path: Sequence[str] = ()
) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """The line to a new fork server, which imports from now on, and its process."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    terms = {"entry": entry, "control": theirs.fileno(), "parent": os.getpid(), "path": list(path)}
    # One thread in numpy's BLAS, whose pool would otherwise start at import and not survive the fork; asking
    # the driver's library for GPUs instead of CUDA itself, which cannot be used in a child once touched.
    extra = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with theirs:
        process = subprocess.Popen(
            # -P: the current folder must not be able to shadow a module of ours or of torch's.
            [sys.executable, "-P", "-m", "unisono.launch.fork_server_main", json.dumps(terms)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an import prints is no data
            pass_fds=[theirs.fileno()],
            env={**extra, **os.environ, **with_huge_pages(os.environ)},
            start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to hear
        )
    return control, process


def cores() -> int:
    """Of this host, that this process may use."""
    return len(os.sched_getaffinity(0))
