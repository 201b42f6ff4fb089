"""Leave a group in the middle of its operations: free what waits for other ranks, and forget torch's groups.

Neither `abort` nor `shutdown` of a Gloo group frees an operation that waits. Shutting down what comes in does, within
milliseconds: Gloo's thread reads the end, fails all that is under way and closes its descriptor. What goes out stays
open: a send that fails while Gloo begins it is forgotten, here or on the other side, and who waits for it waits for
ever. So connections are held until all ranks have left them. A socket that listens is left alone: Gloo's thread that
accepts connections would end the process.
"""

import os
import socket
import time
from collections.abc import Container
from contextlib import suppress

import torch.distributed as dist

READ = 0.5
"""Seconds at most in which Gloo's thread reads that a connection has ended, and closes it."""
LOOK = 0.001
"""Seconds between two looks at whether it has."""


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


def cut(spared: Container[int] = ()) -> list[socket.socket]:
    """Shut down what comes in over this process's TCP connections. spared: descriptors of those that are no group's.

    Returns those that Gloo has closed: hold them until the other ranks have left the group too. Others are shut down as
    a whole.
    """
    held = list[tuple[int, socket.socket]]()
    for fd in sockets():
        with suppress(OSError):
            held += [(fd, socket.socket(fileno=os.dup(fd)))] if fd not in spared else []
    cut_off = [(fd, sock) for fd, sock in held if _shut(sock, socket.SHUT_RD)]
    until = time.monotonic() + READ
    while time.monotonic() < until and any(_is_open(fd, sock) for fd, sock in cut_off):
        time.sleep(LOOK)
    kept = [sock for fd, sock in cut_off if not _is_open(fd, sock)]
    for _, sock in held:
        if sock not in kept:
            with sock:
                _shut(sock, socket.SHUT_RDWR)
    return kept


def _shut(sock: socket.socket, how: int) -> bool:
    """Shut down a connection; False for a socket that listens, and one that has none."""
    try:
        sock.getpeername()
        sock.shutdown(how)
    except OSError:
        return False
    return True


def _is_open(fd: int, sock: socket.socket) -> bool:
    """Whether a descriptor still stands for a socket, of which `sock` is a copy: Gloo closes it once it knows."""
    with suppress(OSError):
        return os.fstat(fd).st_ino == os.fstat(sock.fileno()).st_ino
    return False


def forget() -> None:
    """Forget all groups of this process, so that others can be made. Their connections have been cut."""
    if dist.is_initialized():
        dist.destroy_process_group()
