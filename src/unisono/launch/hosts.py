"""A host as the supervisor sees it: a helper that forks ranks there, and what becomes of them. No torch."""

import contextlib
import os
import select
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.launch import wire
from unisono.launch.rank_status import process_state

Message = dict[str, Any]


class Process(ABC):
    """A rank's process, wherever it is."""

    pid: int

    @abstractmethod
    def kill(self, number: int) -> None:
        """Send it a signal; one that is gone does not mind."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""

    @abstractmethod
    def ended(self) -> None:
        """Return when it is gone, where its host has lost who watches it."""

    def close(self) -> None:
        """Nobody asks any more."""
        return


@dataclass
class OwnProcess(Process):
    """On this host. pidfd: by which the kernel knows it, whoever gets its number afterwards."""

    pid: int
    pidfd: int

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def is_stopped(self) -> bool:
        return process_state(self.pid) == "T"

    def ended(self) -> None:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.poll()

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class RankHost(ABC):
    """Where ranks of a run can be. name: for people. room: how many ranks it takes. cores: of it.

    Raises ConnectionError from `order` when its helper has gone; `hear` then says None.
    """

    name: str
    room: int
    cores: int
    prepared = False
    """Whether its helper has read the data of this run."""
    far = False
    """Whether it is another one than the supervisor's."""
    rate = 0.0
    """Bit/s of the link to it, as far as that was measured; 0 where it was not."""
    delay = 0.0
    """Seconds of a small message to it."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable when `hear` has something."""

    @abstractmethod
    def order(self, message: Message, files: Sequence[int] = ()) -> None:
        """Ask its helper for something; the files are copies of the caller's, who closes them."""

    @abstractmethod
    def hear(self) -> list[tuple[Message, list[int]]] | None:
        """What its helper has said, with open files; None when it has gone."""

    @abstractmethod
    def process(self, message: Message, files: Sequence[int]) -> Process:
        """The process that a message tells of as born."""

    @abstractmethod
    def abandon(self) -> None:
        """End its helper, and with it all its ranks."""

    def beat(self, now: float) -> bool:
        """Give it a sign of life when one is due, in seconds of a monotonic clock. Returns whether it is there."""
        return True

    def probe(self) -> None:
        """Measure the link to it, if there is one."""
        return

    def close(self) -> None:
        """No more orders."""
        return


@dataclass
class OwnHost(RankHost):
    """The host of the supervisor itself. control: the line to its helper."""

    name: str
    room: int
    cores: int
    control: socket.socket
    end: Callable[[], None]

    def fileno(self) -> int:
        return self.control.fileno()

    def order(self, message: Message, files: Sequence[int] = ()) -> None:
        wire.send_message(self.control, message, files)

    def hear(self) -> list[tuple[Message, list[int]]] | None:
        try:
            said = wire.read_message(self.control)
        except OSError:
            said = None
        return [said] if said is not None else None

    def process(self, message: Message, files: Sequence[int]) -> Process:
        return OwnProcess(message["pid"], files[0])

    def abandon(self) -> None:
        self.end()
