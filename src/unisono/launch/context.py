"""What the entry function of a rank is told: its place, and the channel to its supervisor. No torch."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from unisono.launch.run.membership import Role
from unisono.spec.errors import UnisonoError
from unisono.spec.rendezvous import Rendezvous


class Channel(ABC):
    """A rank's channel to its supervisor: events go up, the request to stop comes down. hears: whether one can come."""

    hears: bool = False

    @abstractmethod
    def send(self, kind: str, **fields: Any) -> None:
        """Report an event. Never blocks and never raises on a slow or absent listener."""

    @abstractmethod
    def stop_requested(self) -> bool:
        """True once a stop was asked for (Ctrl-C, SIGTERM): finish the step, save, leave.

        Ranks may hear it at different steps; the caller agrees on one step over a collective.
        """

    def rendezvous(self, error: BaseException) -> Rendezvous | None:
        """Whether ranks meet anew since `error` was raised here, because one was lost; None where nobody replaces it,
        or the error is this rank's own. Waits until it is known."""
        return None

    def moves(self) -> bool:
        """After all ranks have agreed to end with this step: whether that is to meet anew rather than to end the run.
        Waits until it is known here."""
        return False

    def hurried(self) -> bool:
        """True once a scheduler asked for the end (SIGTERM, SIGUSR1): all is to be over within the grace."""
        return False

    def hurry(self) -> None:
        """Another rank was asked so, and this one hears of it from there."""
        return

    def drain(self) -> None:
        """The step under way is given up: what the main thread meets from now on is no failure."""
        return

    def drained(self, text: str) -> None:
        """All ranks have saved, within a step: end the run now, with `text`. Called by a thread beside the main one."""
        return


class NullChannel(Channel):
    """Nobody listens: single-process use, and tests."""

    def send(self, kind: str, **fields: Any) -> None:
        return

    def stop_requested(self) -> bool:
        return False


@dataclass(frozen=True)
class Ending:
    """How a rank that others started ends when it is asked to. grace: seconds from a SIGTERM to the end of the process,
    None for any number. leave(error): tells the error, ends the process at once. asked_ago: seconds since it was asked,
    None if it has not been."""

    grace: float | None = None
    leave: Callable[[UnisonoError], None] = lambda error: None
    asked_ago: float | None = None


@dataclass(frozen=True)
class RankContext:
    """One rank's place in a run.

    `store` is a torch Store for `init_process_group(store=...)`, or None where torch finds its own through the
    environment (`env://`). `backend` is "gloo" or "nccl". `means`: backend and transport, and why these. `appear`: from
    now on, who asks from outside finds this rank in the given folder. epoch: how often ranks have met before.
    `rendezvous`: in which this rank takes a lost one's place among others that train.
    shelf: files in memory that outlive this rank, as whoever takes its place will find them; none where nobody does.
    role: what this process does; one that stands beside the ranks has a rank from `world` on.
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
    run_token: str = field(repr=False)  # a context may come to stand in a traceback
    means: str = ""
    appear: Callable[[Path], None] = lambda folder: None
    epoch: int = 0
    rendezvous: Rendezvous | None = None
    shelf: tuple[int, ...] = ()
    role: Role = Role.TRAINER


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
