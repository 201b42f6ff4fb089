"""Leave a group in the middle of its operations: free what waits for other ranks, and forget torch's groups.

Neither `abort` nor `shutdown` of a Gloo group frees an operation that waits. Shutting down what comes in does, within
milliseconds: Gloo's thread reads the end, fails all that is under way and closes its descriptor. What goes out stays
open: a send that fails while Gloo begins it is forgotten, here or on the other side, and who waits for it waits for
ever. So connections are held until all ranks have left them. A socket that listens is left alone: Gloo's thread that
accepts connections would end the process.
"""

import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

READ = 0.5
"""Seconds at most in which Gloo's thread reads that a connection has ended, and closes it."""
LOOK = 0.001
"""Seconds between two looks at whether it has."""
_INT = 0xFFFFFFFF  # of an epoll entry, what Python fills: the rest is as it was in memory
_NUMBER = struct.Struct("=q")
_WATCHED = re.compile(r"^tfd: *(\d+) .* data: *([0-9a-f]+) .* ino:([0-9a-f]+)", re.MULTILINE)


def connections() -> list[tuple[int, socket.socket]]:
    """The TCP connections of this process's Gloo groups: the descriptor of each, and a copy to close."""
    sockets = dict[int, socket.socket]()
    for watched in _groups():
        for fd, sock in watched.items():
            if _listens(sock) or fd in sockets:
                sock.close()
            else:
                sockets[fd] = sock
    return list(sockets.items())


def hang_up(size: int) -> None:
    """Free who waits, while a group of at most `size` ranks is made, for a rank that will not connect: connect in its
    place, and leave. Gloo hands a connection to whoever waits for the number that comes over it first, which is below
    the size of the group."""
    for watched in _groups():
        for sock in watched.values():
            with suppress(OSError), sock:
                for number in range(size if _listens(sock) else 0):
                    with socket.socket(sock.family) as caller:
                        caller.settimeout(READ)
                        caller.connect(sock.getsockname())
                        caller.sendall(_NUMBER.pack(number))


def _groups() -> Iterator[dict[int, socket.socket]]:
    """Yield, for each group of this process, copies of the sockets that Gloo watches, by descriptor. Close the copies.

    They are in one epoll set, with the socket on which Gloo listened for the others. For each Gloo keeps a pointer,
    where Python's own servers keep the descriptor's number. So what the user's code has connected, to a database, a
    tracker or a store of files, is none of these.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                watched = _copies(Path(f"/proc/self/fdinfo/{name}").read_text())
                if any(map(_listens, watched.values())):
                    yield watched
                else:
                    for sock in watched.values():
                        sock.close()


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _copies(info: str) -> dict[int, socket.socket]:
    """Return copies of the TCP sockets that an epoll set watches by pointers. info: the kernel's text about the set."""
    copies = dict[int, socket.socket]()
    for fd, data, inode in _WATCHED.findall(info):
        with suppress(OSError):
            copy = os.dup(int(fd))
            seen = os.fstat(copy)
            known = seen.st_ino == int(inode, 16)  # else its number is another's by now
            if known and stat.S_ISSOCK(seen.st_mode) and int(fd) != int(data, 16) & _INT:
                copies[int(fd)] = socket.socket(fileno=copy)
            else:
                os.close(copy)
    tcp = (socket.AF_INET, socket.AF_INET6)
    for fd in [fd for fd, sock in copies.items() if sock.family not in tcp]:
        copies.pop(fd).close()
    return copies


def cut() -> list[socket.socket]:
    """Shut down what comes in over the connections of this process's groups.

    Returns those that Gloo has closed: hold them until the other ranks have left the group too. Others are shut down as
    a whole.
    """
    held = connections()
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
