"""How much memory this process uses, in MiB."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import psutil

_MIB = 2**20
_CGROUP = Path("/sys/fs/cgroup")


def rss_mib() -> float:
    """Memory that is resident now."""
    return _status(b"\nVmRSS:") or psutil.Process().memory_info().rss / _MIB


def peak_rss_mib() -> float:
    """The most that was resident so far; where the system does not say, what is resident now."""
    return _status(b"\nVmHWM:") or rss_mib()


def _status(field: bytes) -> float:
    """A size from Linux's own account of the process; 0 elsewhere. /proc is read because psutil has no peak there, and
    getrusage's is that of whoever started us where that was more. Asked at every step: bytes, without a parser."""
    try:
        file = os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        text = os.read(file, 4096)
    finally:
        os.close(file)
    at = text.find(field)
    return int(text[at + len(field) : text.index(b"kB", at)]) / 1024 if at >= 0 else 0.0


def available() -> int:
    """Bytes that this machine, or the container that this process runs in, has left for it."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        free = min(
            free, int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text())
        )
    return free


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU library, in its order."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def heap() -> dict[str, int]:
    """What the C library's allocator has from the system, in bytes: `heap_used`, `heap_free` (kept between pieces in
    use, or for the next step: what is fragmented lies here), `heap_top` (of that, what could go back), `mapped` (large
    pieces, each with pages of its own). Empty where it does not say (before glibc 2.33, or another library)."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return {}
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return {
        "heap_used": info.uordblks, "heap_free": info.fordblks, "heap_top": info.keepcost, "mapped": info.hblkhd
    }  # fmt: skip
