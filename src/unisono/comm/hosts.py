"""Which members of a group are on one host: those that see one network."""

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from unisono.comm.collectives.messages.live import start_gather


def nodes_of(pg: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Places of the members on each host, in the order of the first of each. Every member calls it, or it hangs."""
    mine = torch.tensor([mark()], dtype=torch.int64)
    marks = mine.new_empty(pg.size())
    start_gather(marks, mine, pg).wait()
    hosts: dict[int, list[int]] = {}
    for place, number in enumerate(marks.tolist()):
        hosts.setdefault(number, []).append(place)
    return tuple(map(tuple, hosts.values()))


def mark() -> int:
    """A number that processes of one host share: its boot and its network, so that two namespaces are two hosts."""
    boot = socket.gethostname()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    with suppress(OSError):
        boot += str(os.stat("/proc/self/ns/net").st_ino)
    return int.from_bytes(hashlib.sha256(boot.encode()).digest()[:8], "little", signed=True)


def own_address() -> str:
    """This host's IPv4 address on the device that Gloo was given, or on which its default route begins, or of the first
    device that has one. Raises OSError where none has."""
    devices = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if not devices:
            probe.connect(("10.255.255.255", 1))  # sends nothing
            return str(probe.getsockname()[0])
    known = psutil.net_if_addrs()
    # Without a way out: hosts of a network of their own.
    for name in devices or sorted(known.keys() - {"lo"}):
        for address in known.get(name, ()):
            if address.family is socket.AF_INET:
                return address.address
    raise OSError(f"no network of this host has an address: {', '.join(devices or known)}")
