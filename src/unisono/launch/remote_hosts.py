"""Other hosts of a run: who was asked to come, how they are started, and where they join. No torch."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unisono.launch.host_listener import ADDRESS_FILE, HostListener
from unisono.launch.run.membership import Choice
from unisono.spec.errors import UnisonoError, UsageError

PATIENCE = 60.0
"""Seconds that hosts have to come."""
_LEAVE = 5.0


@dataclass(frozen=True, slots=True)
class RequestedHost:
    """A host that is asked to join. room: how many ranks it takes."""

    name: str
    room: int


@dataclass
class RemoteHosts:
    """listener: where hosts join. room: on this host. choice: how the run goes on with room for so many ranks.
    requested: who was asked; others may join too."""

    listener: HostListener
    room: int
    choice: Choice | None = None
    requested: Sequence[RequestedHost] = ()
    patience: float = PATIENCE
    _since: float = field(default_factory=time.monotonic)
    _shells: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _door: Path | None = None

    def open(self, shell: str, run_dir: Path) -> None:
        """Let others join: who may read the run's folder finds the door there; requested hosts are asked by `shell HOST
        COMMAND`, which hears of the token by its input. Raises UsageError U-L10 where there is no such shell."""
        self.listener.write_door(run_dir)
        self._door = run_dir / ADDRESS_FILE
        for host in self.requested:
            words = [
                sys.executable,
                "-m",
                "unisono",
                "host",
                "-",
                "--ranks",
                str(host.room),
                "--name",
                host.name,
            ]
            command = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
            try:
                process = subprocess.Popen(
                    [*shlex.split(shell), host.name, command],
                    stdin=subprocess.PIPE, stdout=2, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise UsageError(
                    f"cannot start anything on other hosts: {shlex.split(shell)[0]}: {error.strerror}",
                    where="launch.shell", fix="a command that runs another one on a host, such as ssh", code="L10",
                ) from error  # fmt: skip
            self._shells[host.name] = process
            if process.stdin is not None:
                with contextlib.suppress(OSError), process.stdin as pipe:
                    pipe.write(json.dumps(self.listener.door).encode() + b"\n")

    def wait(self) -> None:
        """From now on hosts have their time to come, the first time or again."""
        self._since = time.monotonic()

    def next_deadline(self, has_begun: bool) -> float | None:
        """When something is to be looked at, in seconds of a monotonic clock."""
        due = [self.listener.next_deadline(), None if has_begun else self._since + self.patience]
        return min((time_ for time_ in due if time_ is not None), default=None)

    def missing(self, names: Iterable[str], now: float) -> UnisonoError | None:
        """Why the run cannot begin, once that is sure: who has not come. names: of the hosts that are there."""
        here = set(names)
        late = [host.name for host in self.requested if host.name not in here]
        failed = {
            name: code
            for name in late
            if (code := self._shells[name].poll() if name in self._shells else None)
        }
        if not failed and now - self._since < self.patience:
            return None
        who = ", ".join(failed or late) or "enough hosts"
        code = f": its shell left with {next(iter(failed.values()))}" if failed else ""
        return UsageError(
            f"{who} did not join{code}", where="--hosts",
            likely=f"nothing is started there, or it does not reach {self.listener.address}:{self.listener.port}",
            fix="look at what was said above; ssh HOST has to work without a password", code="L10",
        )  # fmt: skip

    def close(self) -> None:
        """Nobody joins any more. Agents have been told to end; their shells end with them."""
        self.listener.close()
        if self._door is not None:
            self._door.unlink(missing_ok=True)
        until = time.monotonic() + _LEAVE
        for process in self._shells.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_here(name: str) -> bool:
    """Whether a name means this host."""
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
            probe.bind((address[4][0], 0))  # only an address of this host can be bound
            return True
    return False


def address_towards(name: str) -> str:
    """This host's own address, as a host of that name sees it. Raises UsageError U-L10."""
    try:
        family, _, _, _, target = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"host {name} is not known here, or not reached", where="--hosts", likely=str(error),
            fix="a name or an address that this host reaches", code="L10",
        ) from error  # fmt: skip
