"""Leave a group in the middle of its operations: free what waits for other ranks, and forget torch's groups.

Neither `abort` nor `shutdown` of a Gloo group frees an operation that waits. Shutting down its sockets does, within a
millisecond. A socket that listens is left alone: Gloo's thread that accepts connections would end the process.
"""

import os
import socket
from collections.abc import Container
from contextlib import suppress

import torch.distributed as dist


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
    count = 0
    for fd in sockets():
        if fd in spared:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            sock.getpeername()  # raises for one that listens
            sock.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def forget() -> None:
    """Forget all groups of this process, so that others can be made. Their connections have been cut."""
    if dist.is_initialized():
        dist.destroy_process_group()
