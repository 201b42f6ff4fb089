"""The network of a lab while it stands: hosts, cables, a switch between more than two of them.

with LabNetwork(4, LabLink(100e6)) as network:
    with inside(network.hosts[2]): ...          # or, in a process of its own, enter(network.doors[2])
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from unisono.spec.errors import Skipped, UsageError
from unisono_contrib.lab import links
from unisono_contrib.lab.links import Command, LabLink
from unisono_contrib.lab.relay import open_tap
from unisono_contrib.lab.spaces import inside, new_network

End = tuple[int, str]  # of a cable: the network, and the device in there
_DEVICES = "/proc/thread-self/net/dev"


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """What a host's device has carried, with heads of frames. Segmentation offload hides some of them."""

    sent: int
    received: int

    def since(self, before: "DeviceBytes") -> "DeviceBytes":
        return DeviceBytes(self.sent - before.sent, self.received - before.received)


def require(link: LabLink) -> None:
    """Raises Skipped, U-L06, where no such network can be made here."""
    missing = [] if os.geteuid() == 0 else ["root"]
    missing += [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if link.delay and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        missing.append("/dev/net/tun")
    if missing:
        raise Skipped(
            f"skipped: a lab needs {', '.join(missing)}",
            where="unisono lab",
            fix="run it as root, with the package iproute2; without them nothing was run",
            code="L06",
        )


class LabNetwork:
    """Made by `__enter__`, gone after `__exit__`, or with this process however it ends.

    hosts: the network of each, as an open file. doors: paths by which other processes of this user find them.
    """

    def __init__(self, hosts: int, link: LabLink) -> None:
        self.link, self._count = link, hosts
        self.hosts: tuple[int, ...] = ()
        self._held = ExitStack()

    @property
    def doors(self) -> tuple[str, ...]:
        return tuple(f"/proc/{os.getpid()}/fd/{file}" for file in self.hosts)

    def __enter__(self) -> Self:
        """Raises Skipped (U-L06), UsageError (U-L07)."""
        require(self.link)
        with ExitStack() as stack:
            try:
                self._make(stack)
            except OSError as error:
                raise _refused(str(error)) from error
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.hosts = ()
        self._held.close()

    def traffic(self) -> list[DeviceBytes]:
        """Of each host's device until now."""
        counters = []
        for file in self.hosts:
            with inside(file):
                counters.append(device_bytes(Path(_DEVICES).read_text(), links.DEVICE))
        return counters

    def _make(self, stack: ExitStack) -> None:
        self.hosts = tuple(_network(stack) for _ in range(self._count))
        # Two hosts need no switch, which would be twice the work for the processor.
        switch = None if self._count == 2 else _network(stack)
        if switch is None:
            cables = [((self.hosts[0], links.DEVICE), (self.hosts[1], links.DEVICE))]
        else:
            _run(switch, links.switch_itself())
            cables = [((h, links.DEVICE), (switch, links.port(i))) for i, h in enumerate(self.hosts)]
        self._join(cables, 1 if switch is None else 2, stack)
        for number, host in enumerate(self.hosts):
            if switch is not None:
                _run(switch, links.switch_side(number, self.link))
            _run(host, links.host_side(number, self.link))

    def _join(self, cables: Sequence[tuple[End, End]], hops: int, stack: ExitStack) -> None:
        """hops: how many cables lie between two hosts."""
        if not self.link.delay:
            for (network, near), (other, far) in cables:
                _run(network, [links.cable(near, far, other)], [other])
            return
        wires = [(_tap(*near, stack), _tap(*far, stack)) for near, far in cables]
        terms = {"parent": os.getpid(), "wires": wires, "hold": self.link.delay / hops}
        relay = subprocess.Popen(
            [sys.executable, "-P", "-m", "unisono_contrib.lab.relay", json.dumps(terms)],
            stdin=subprocess.DEVNULL,
            pass_fds=[file for wire in wires for file in wire],
            start_new_session=True,  # a terminal's Ctrl-C is the lab's to hear
        )
        stack.callback(_end, relay)


def device_bytes(table: str, device: str) -> DeviceBytes:
    """Of one device in a table of the kernel's /proc/net/dev."""
    for line in table.splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == device:
            fields = numbers.split()
            return DeviceBytes(int(fields[8]), int(fields[0]))
    raise OSError(f"no device {device}")


def _network(stack: ExitStack) -> int:
    file = new_network()
    stack.callback(os.close, file)
    with inside(file), suppress(OSError):  # what IPv6 sends by itself would be counted
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    return file


def _tap(network: int, device: str, stack: ExitStack) -> int:
    with inside(network):
        file = open_tap(device)
    stack.callback(os.close, file)
    return file


def _run(network: int, commands: Sequence[Command], files: Sequence[int] = ()) -> None:
    """Commands inside a network. Raises UsageError U-L07."""
    with inside(network):
        for words in commands:
            done = subprocess.run(words, pass_fds=files, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
                raise _refused(f"{' '.join(words)}: {said}")


def _refused(what: str) -> UsageError:
    return UsageError(
        f"the kernel refuses a link of the lab: {what}",
        where="unisono lab",
        likely="a container without CAP_SYS_ADMIN and CAP_NET_ADMIN, or a kernel without veth, bridge or tbf",
        fix="run it on the machine itself, as root",
        code="L07",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
