"""Memory that a rank frees stays with it, in pieces that fit again. No torch."""

import ctypes
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# malloc.h of the GNU library; elsewhere these names do not exist, or mean nothing.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_MMAP = (1 << 30, 32 << 20)  # the second is what older versions allow
_LARGE = 4 << 20
_NEVER = 2**31 - 1
_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that is to be started, so that its C library asks for pages of
    2 MiB: nothing where the system has none or the user has decided. It is read once, when a process starts."""
    tunables = environ.get(_TUNABLES, "")
    if _HUGE in tunables or not _has_huge_pages():
        return {}
    return {_TUNABLES: ":".join(filter(None, (tunables, f"{_HUGE}=1")))}


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Have the C library keep what is freed, for the next step to use again; False where that cannot be asked for.

    By default it hands large blocks back to the system at once, so that each step of a training loop on CPUs
    gets the same megabytes again page by page: about 1200 page faults a step for a model of a million parameters.
    Where this process has huge pages, blocks of 4 MiB and more are handed back nevertheless: getting them again is
    two faults or three, and kept ones do not fit each other, so that a rank under FSDP2 was half as large again
    (`benchmarks/heap.py`).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    huge = f"{_HUGE}=1" in environ.get(_TUNABLES, "") and _has_huge_pages()
    kept = any(mallopt(_MMAP_THRESHOLD, size) for size in ((_LARGE,) if huge else _MOST_MMAP))
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and kept


def remember_few_collectives(environ: MutableMapping[str, str]) -> None:
    """Have torch's flight recorder keep the last 64 collectives of a rank on a CPU, unless the user says how many. They
    show where a rank stood. By default it keeps 2000: small blocks of memory between the large ones of tensors, so that
    freed blocks do not fit again. In its first 40 steps a rank under tp grew to twice the memory that it needs. Call
    this before groups are made."""
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _PAGES.read_text()
    except OSError:
        return False
