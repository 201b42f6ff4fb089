"""Leave a group in the middle of its operations: free what waits for other ranks, and forget torch's groups.

Neither `abort` nor `shutdown` of a Gloo group frees an operation that waits. Shutting down its sockets does, within
milliseconds: first what comes in, so that Gloo's thread reads the end and fails all that is under way. A send that Gloo
is about to begin when what goes out is shut down is forgotten, and who waits for it waits for ever. A socket that
listens is left alone: Gloo's thread that accepts connections would end the process.
"""

import os
import socket
import time
from collections.abc import Container
from contextlib import suppress

import torch.distributed as dist

READ = 0.005
"""Seconds in which Gloo's thread reads that a connection has ended."""


def sockets() -> frozenset[int]:
    """Descriptors of this process's TCP sockets."""
    found = set[int]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _family(int(name)) in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                found.add(int(name))
    return frozenset(found)


def _family(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.family


def cut(spared: Container[int] = ()) -> int:
    """Shut down this process's TCP connections; returns how many. spared: descriptors of those that are no group's."""
    held, count = list[socket.socket](), 0
    for fd in sockets():
        with suppress(OSError):
            held += [socket.socket(fileno=os.dup(fd))] if fd not in spared else []
    for sock in held:
        with suppress(OSError):
            sock.getpeername()  # raises for one that listens
            sock.shutdown(socket.SHUT_RD)
            count += 1
    time.sleep(READ if count else 0.0)
    for sock in held:
        with suppress(OSError), sock:
            sock.getpeername()
            sock.shutdown(socket.SHUT_RDWR)
    return count


def forget() -> None:
    """Forget all groups of this process, so that others can be made. Their connections have been cut."""
    if dist.is_initialized():
        dist.destroy_process_group()
