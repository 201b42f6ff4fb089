"""How much memory this process uses, in MiB."""

import os
from collections.abc import Callable

import psutil

_MIB = 2**20


def rss_mib() -> float:
    """Memory that is resident now."""
    return _status(b"\nVmRSS:") or psutil.Process().memory_info().rss / _MIB


def peak_rss_mib() -> float:
    """The most that was resident so far; where the system does not say, what is resident now."""
    return _status(b"\nVmHWM:") or rss_mib()


def used(cuda_peak_bytes: Callable[[], int] | None = None) -> dict[str, float]:
    """`rss_mib`, `peak_rss_mib` and, given a function that asks the device, `cuda_peak_mib`."""
    sizes = {"rss_mib": rss_mib(), "peak_rss_mib": peak_rss_mib()}
    if cuda_peak_bytes is not None:
        sizes["cuda_peak_mib"] = cuda_peak_bytes() / _MIB
    return {name: round(size, 1) for name, size in sizes.items()}


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
