"""Two "hosts" on one machine: network namespaces with a slow link between them. Needs root, `ip`, `tc`."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000
HOSTS = ("unisono-a", "unisono-b")
# Seconds of a core for a byte that a rank sends at 1 Gbit/s, beyond those over loopback: the last column of wire.py.
# The processor does here what a network card does.
WORK = 4.5e-9


def possible() -> bool:
    """Whether a link can be made here."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextmanager
def link(megabits: float) -> Iterator[tuple[str, ...]]:
    """Both ends of a link of `megabits` per second each way, as names of namespaces; it is gone afterwards."""
    _down()
    try:
        for host in HOSTS:
            _sh("ip", "netns", "add", host)
            _sh("ip", "-n", host, "link", "set", "lo", "up")
        _sh("ip", "link", "add", "lab0", "netns", HOSTS[0], "type", "veth",
            "peer", "name", "lab0", "netns", HOSTS[1])  # fmt: skip
        for number, host in enumerate(HOSTS, 1):
            _sh("ip", "-n", host, "addr", "add", f"10.99.77.{number}/24", "dev", "lab0")
            _sh("ip", "-n", host, "link", "set", "lab0", "up")
            _sh("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "lab0", "root", "tbf",
                "rate", f"{megabits}mbit", "burst", str(burst(megabits)), "latency", "50ms")  # fmt: skip
            # What is larger than a burst would be cut into frames by the processor, which ranks need.
            _sh("ip", "-n", host, "link", "set", "lab0", "gso_max_size", str(burst(megabits) * 3 // 4))
        yield HOSTS
    finally:
        _down()


def burst(megabits: float) -> int:
    """Bytes that may pass at once: what the link carries in a quarter of a millisecond, but three frames. More
    lets the beginning of each message through for nothing, as no network card does."""
    return max(5000, round(megabits * 1e6 / 8 * 0.25e-3))


def enter(host: str) -> None:
    """Move this process, which has one thread, to a host of the lab, and have Gloo meet on its link."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", host).open() as door:
        if libc.setns(door.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lab0"


def _down() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def _sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
