"""A command on the hosts of a lab: start it everywhere, watch, end all of it. No torch."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from unisono.launch import wire
from unisono.launch.signals import Signals
from unisono.launch.starters import PORT, STARTERS
from unisono.spec.errors import UsageError
from unisono_contrib.lab import links
from unisono_contrib.lab.network import LabNetwork
from unisono_contrib.lab.shell import SOCKET, Shells

GRACE = 15.0
"""Seconds that the others get to end by themselves after one has failed: they know whose fault it was."""
STOP_GRACE = 60.0
"""Seconds that all get to save and leave once they are asked to stop."""

_LEAVE = 10.0


@dataclass(frozen=True, slots=True)
class LabCommand:
    """One process that the lab starts. number: among all of them; host: where."""

    number: int
    host: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]


def commands(
    words: Sequence[str],
    counts: Sequence[int],
    environ: Mapping[str, str],
    starter: str,
    cores: int,
    each: str = "rank",
) -> list[LabCommand]:
    """`words` for what `each` names. rank: each one, under the variables that `starter` would leave. host: each one; a
    launcher, such as torchrun, starts the ranks itself. first: the first host alone, whence `unisono train --hosts`
    starts what it needs on the others.

    counts: ranks of each host. In the words, {host} {hosts} {rank} {ranks} {local_rank} {local_ranks} {names} {master}
    {port} mean what they say; other braces stay. cores: of the machine, which the ranks of all hosts share. Raises
    UsageError for a starter that is none.
    """
    around, ranks = _around(environ, cores, sum(counts)), sum(counts)
    same = {"hosts": len(counts), "ranks": ranks, "master": links.host_name(0), "port": PORT}

    def started(number: int, host: int, known: Mapping[str, object], more: Mapping[str, str]) -> LabCommand:
        argv = list(words)
        for name, value in {**same, "host": host, "rank": number, **known}.items():
            argv = [word.replace(f"{{{name}}}", str(value)) for word in argv]
        return LabCommand(number, host, tuple(argv), {**around, **more})

    if each == "first":
        shell = {"UNISONO_LAUNCH_SHELL": f"{sys.executable} -P -m unisono_contrib.lab.shell"}
        names = ",".join(f"{links.host_name(host)}:{count}" for host, count in enumerate(counts))
        return [started(0, 0, {"names": names}, shell)]
    if each == "host":
        return [started(host, host, {"local_ranks": count}, {}) for host, count in enumerate(counts)]
    leaves = STARTERS.find(starter)().leaves
    seats = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    return [
        started(rank, host, {"local_rank": local}, leaves(host, local, counts))
        for rank, (host, local) in enumerate(seats)
    ]


def _around(environ: Mapping[str, str], cores: int, ranks: int) -> dict[str, str]:
    """The environment of all: backends meet on the lab's link, and hosts do not each count all cores as theirs."""
    device = {f"{backend}_SOCKET_IFNAME": links.DEVICE for backend in ("GLOO", "NCCL", "TP")}
    threads = str(max(1, cores // ranks))
    share = {"OMP_NUM_THREADS": threads, "UNISONO_LAUNCH_THREADS_PER_RANK": threads}
    return {**share, **environ, **device}


@dataclass
class Play:
    """The commands of a lab while they run. A context manager; after it nothing of them is left."""

    network: LabNetwork
    tell: Callable[[str], None] = lambda text: None
    stdout: int | None = None
    statuses: dict[int, int] = field(default_factory=dict)
    stopped: list[int] = field(default_factory=list)
    first: int | None = None
    shells: Shells | None = None
    _hosts: list[tuple[socket.socket, subprocess.Popen[bytes]]] = field(default_factory=list)
    _deadline: float | None = None

    def __enter__(self) -> Self:
        """Starts the hosts. Raises UsageError U-L07."""
        try:
            count = len(self.network.hosts)
            for number, file in enumerate(self.network.hosts):
                self._hosts.append(self._host(number, file, links.hosts_file(count)))
            for control, _ in self._hosts:
                got = wire.read_message(control)
                if got is None or got[0]["op"] != "ready":
                    what = "it ended" if got is None else got[0]["what"]
                    raise UsageError(
                        f"a host of the lab cannot be made: {what}", where="unisono lab", code="L07"
                    )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, orders: Sequence[LabCommand], folder: str) -> int:
        """Start all and watch them to the end. The exit code: of the first that failed; 0 if none did."""
        names = [links.host_name(number) for number in range(len(self._hosts))]
        with (
            Signals() as signals,
            selectors.DefaultSelector() as selector,
            Shells(selector, names, self._called) as self.shells,
        ):
            reached = {SOCKET: self.shells.path}
            for order in orders:
                self._order(order.host, op="start", number=order.number, argv=order.argv,
                            environ={**order.environ, **reached},
                            folder=folder)  # fmt: skip
            for control, _ in self._hosts:
                selector.register(control, selectors.EVENT_READ)
            selector.register(signals, selectors.EVENT_READ)
            while len(self.statuses) < len(orders):
                patience = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                for key, _ in selector.select(patience):
                    if key.fileobj is signals:
                        self._signalled(signals.take())
                    elif key.data is not None:
                        key.data()
                    elif not self._heard(key.fileobj):
                        selector.unregister(key.fileobj)
                        lost = [order.number for order in orders if self._hosts[order.host][0] is key.fileobj]
                        for number in lost:
                            self._ended(number, -signal.SIGKILL)
                if self._deadline is not None and self._deadline <= time.monotonic():
                    self.tell("the lab ends what has not ended by itself")
                    return self._code()
        return self._code()

    def close(self) -> None:
        """End everything on all hosts; returns when it is gone."""
        for control, _ in self._hosts:
            # Process number 1 of the host leaves at that, the kernel ends all others there, and the outer one waits.
            control.close()
        for _, process in self._hosts:
            try:
                process.wait(_LEAVE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._hosts = []

    def _host(self, number: int, file: int, hosts_file: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        terms = {"parent": os.getpid(), "network": file, "control": theirs.fileno(),
                 "name": links.host_name(number), "hosts_file": hosts_file}  # fmt: skip
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unisono_contrib.lab.host", json.dumps(terms)],
                stdin=subprocess.DEVNULL, stdout=self.stdout, pass_fds=[file, theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        return control, process

    def _called(self, host: int, number: int, message: dict[str, Any], files: list[int]) -> None:
        """A command that another one has asked for."""
        wire.send_message(self._hosts[host][0], {**message, "op": "start", "number": number}, files)

    def _order(self, host: int, **message: Any) -> None:
        with contextlib.suppress(OSError):  # one that has gone is heard of when it is read
            wire.send_message(self._hosts[host][0], message)

    def _heard(self, control: Any) -> bool:
        try:
            got = wire.read_message(control)
        except OSError:
            got = None
        if got is None:
            return False
        if got[0]["op"] == "exit":
            self._ended(got[0]["number"], got[0]["status"])
        return True

    def _ended(self, number: int, status: int) -> None:
        if number in self.statuses or (self.shells is not None and self.shells.ended(number, status)):
            return
        self.statuses[number] = status
        if status and self.first is None:
            self.first = status
            self._deadline = self._deadline or time.monotonic() + GRACE

    def _signalled(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.stopped.append(number)
            self._deadline = time.monotonic() + (STOP_GRACE if len(self.stopped) == 1 else 0.0)
            for host in range(len(self._hosts)):
                self._order(host, op="signal", number=number)

    def _code(self) -> int:
        if self.first is not None:
            return exit_code(self.first)
        return exit_code(-self.stopped[0]) if self._deadline is not None and self.stopped else 0


def exit_code(status: int) -> int:
    """As a shell has it: 128 + n after signal n."""
    return status if status >= 0 else 128 - status
