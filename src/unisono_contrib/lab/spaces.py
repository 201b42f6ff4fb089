"""Name spaces of the kernel: networks that are open files, and processes, mounts and a name of one's own."""

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NEW_MOUNTS, _NEW_NAME, _NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_OF_THREAD = "/proc/thread-self/ns/net"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def new_network() -> int:
    """An empty network, as an open file: it is gone when the last file of it is closed and nobody is inside. Raises
    OSError."""
    home = os.open(_OF_THREAD, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc().unshare(NEW_NETWORK), "a new network")
        try:
            return os.open(_OF_THREAD, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            go_into(home)
    finally:
        os.close(home)


def go_into(network: int) -> None:
    """This thread, and what it starts from now on, in another network. Raises OSError."""
    _checked(_libc().setns(network, NEW_NETWORK), "entering a network")


@contextlib.contextmanager
def inside(network: int) -> Iterator[None]:
    """This thread in another network for a while."""
    home = os.open(_OF_THREAD, os.O_RDONLY | os.O_CLOEXEC)
    try:
        go_into(network)
        try:
            yield
        finally:
            go_into(home)
    finally:
        os.close(home)


def enter(door: str) -> None:
    """This process, which has one thread, in the network behind a path such as /proc/17/fd/5. Raises OSError."""
    with Path(door).open("rb") as file:
        go_into(file.fileno())


def leave_for(network: int) -> None:
    """This process in another network, with mounts and a host's name of its own; its next child, and all that descend
    from it, with process numbers of their own: that child is number 1, and with it they all end. Raises OSError."""
    go_into(network)
    _checked(_libc().unshare(_NEW_MOUNTS | _NEW_NAME | _NEW_PROCESSES), "name spaces")


def settle(name: str, hosts_file: str) -> None:
    """In that child: /proc, /sys and /etc/hosts as they are in here, and the host's name. Raises OSError."""
    _mount("none", "/", flags=_PRIVATE | _REC)
    _checked(_libc().sethostname(name.encode(), len(name.encode())), "a host's name")
    _mount("proc", "/proc", "proc")
    # The control groups of the machine stay in sight: a run may ask them how much memory it has.
    groups = os.open("/sys/fs/cgroup", os.O_PATH)
    try:
        _mount("sysfs", "/sys", "sysfs")
        with contextlib.suppress(OSError):
            _mount(f"/proc/self/fd/{groups}", "/sys/fs/cgroup", flags=_BIND | _REC)
    finally:
        os.close(groups)
    with tempfile.NamedTemporaryFile("w") as file:  # once it is mounted, its own name may go
        file.write(hosts_file)
        file.flush()
        Path(file.name).chmod(0o644)
        _mount(file.name, "/etc/hosts", flags=_BIND)


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    result = _libc().mount(source.encode(), target.encode(), kind.encode() or None, flags, None)
    _checked(result, f"mounting {target}")
