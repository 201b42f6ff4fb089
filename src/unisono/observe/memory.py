"""How much memory this process uses, in MiB."""

from collections.abc import Callable
from pathlib import Path

import psutil

_MIB = 2**20


def rss_mib() -> float:
    """Memory that is resident now."""
    return _status("VmRSS") or psutil.Process().memory_info().rss / _MIB


def peak_rss_mib() -> float:
    """The most that was resident so far; where the system does not say, what is resident now."""
    return _status("VmHWM") or rss_mib()


def used(cuda_peak_bytes: Callable[[], int] | None = None) -> dict[str, float]:
    """`rss_mib`, `peak_rss_mib` and, given a function that asks the device, `cuda_peak_mib`."""
    sizes = {"rss_mib": rss_mib(), "peak_rss_mib": peak_rss_mib()}
    if cuda_peak_bytes is not None:
        sizes["cuda_peak_mib"] = cuda_peak_bytes() / _MIB
    return {name: round(size, 1) for name, size in sizes.items()}


def _status(field: str) -> float:
    """A size from Linux's own account of the process; 0 elsewhere. /proc is read because psutil has no peak there."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), 0.0)
