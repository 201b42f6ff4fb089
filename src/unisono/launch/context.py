"""What a rank is told about itself, and the channel to its supervisor. No torch."""

import json
import os
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from unisono.launch import wire
from unisono.launch.pace import StepPace


class Channel(ABC):
    """A rank's channel to its supervisor: events go up, the request to stop comes down."""

    @abstractmethod
    def send(self, kind: str, **fields: Any) -> None:
        """Report an event. Never blocks and never raises on a slow or absent listener."""

    @abstractmethod
    def stop_requested(self) -> bool:
        """True once a stop was asked for (Ctrl-C, SIGTERM): finish the step, save, leave.

        Ranks may hear it at different steps; the caller agrees on one step over a collective.
        """


class NullChannel(Channel):
    """Nobody listens: single-process use, and tests."""

    def send(self, kind: str, **fields: Any) -> None:
        return

    def stop_requested(self) -> bool:
        return False


class SocketChannel(Channel):
    """The line of a forked rank: JSON frames over a stream socket pair.

    A training step must not wait for a screen: what the kernel's buffer does not take is kept here, and beyond
    `room` bytes of backlog further events are dropped and counted.
    """

    def __init__(self, sock: socket.socket, room: int = 4 << 20, pace: StepPace | None = None) -> None:
        self._sock = sock
        self._pace = pace or StepPace()
        self._room = room
        self._backlog = bytearray()
        self._frames = wire.Frames()
        self._heard: set[str] = set()
        self._lock = threading.Lock()
        self.dropped = 0
        self.asked = ""  # by a signal to this rank: "interrupt" or "terminate"
        self._told = False

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self._pace.stepped(fields["step"])
        data = wire.frame(wire.dumps({"kind": kind, **fields}))
        with self._lock:
            if len(self._backlog) + len(data) > self._room:
                self.dropped += 1
                return
            self._backlog += data
            self._push()

    def _push(self) -> None:
        while self._backlog:
            try:
                sent = self._sock.send(self._backlog, socket.MSG_DONTWAIT)
            except OSError:
                # A full buffer, or no listener any more; in the latter case the kernel is about to end us.
                return
            del self._backlog[:sent]

    def stop_requested(self) -> bool:
        if self.asked and not self._told:
            self._told = True
            self.send("asked", how=self.asked)
        with self._lock:
            self._listen(socket.MSG_DONTWAIT)
            return bool(self.asked) or "stop" in self._heard

    def _listen(self, flags: int) -> bool:
        """Take in what has come; False when the other side has left."""
        try:
            data = self._sock.recv(4096, flags)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._heard.update(json.loads(one)["kind"] for one in self._frames.feed(data))
        return bool(data)

    def farewell(self, kind: str, **fields: Any) -> None:
        """Report the last event, whatever it takes, and wait until all ranks have reported theirs.

        Waiting matters: a rank that closed its sockets while another still waits for bytes would look like a failure.
        """
        data = wire.frame(wire.dumps({"kind": kind, **fields}))
        with self._lock:
            self._sock.setblocking(True)
            try:
                self._sock.sendall(bytes(self._backlog) + data)
            except OSError:
                return
            self._backlog.clear()
        while "leave" not in self._heard and self._listen(
            0
        ):  # without the lock: the lookout may have to speak
            pass


@dataclass
class PrintChannel(Channel):
    """The line of a rank started by others (torchrun, Slurm): `show` draws what rank 0 reports."""

    rank: int
    show: Callable[[int, dict[str, Any]], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    pace: StepPace = field(default_factory=StepPace)

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self.pace.stepped(fields["step"])
        if self.rank == 0 and self.show is not None:
            self.show(0, {"kind": kind, **fields})

    def stop_requested(self) -> bool:
        return self.stop.is_set()


@dataclass(frozen=True)
class RankContext:
    """One rank's place in a run.

    `store` is a torch Store for `init_process_group(store=...)`, or None where torch finds its own through the
    environment (`env://`). `backend` is "gloo" or "nccl". `means`: backend and transport, and why these. `appear`: from
    now on, who asks from outside finds this rank in the given folder.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    threads: int
    backend: str
    store: Any
    channel: Channel
    run_token: str
    means: str = ""
    appear: Callable[[Path], None] = lambda folder: None


def flush_and_leave(code: int) -> NoReturn:
    """End this process at once. torch's own way out aborts at random when Gloo groups are alive."""
    mpi = sys.modules.get("mpi4py.MPI")
    if code == 0 and mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()  # else mpirun takes this rank for one that died, and ends the others
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)
