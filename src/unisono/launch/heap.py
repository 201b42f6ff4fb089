"""Memory that a rank frees stays with it, in pieces that fit again. No torch."""

import ctypes
from collections.abc import MutableMapping

# malloc.h of the GNU library; elsewhere these names do not exist, or mean nothing.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_MMAP = (1 << 30, 32 << 20)  # the second is what older versions allow
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, for the next step to use again; False where that cannot be asked for.

    By default it hands large blocks back to the system at once, so that each step of a training loop on processors
    gets the same megabytes again page by page: about 1200 page faults a step for a model of a million parameters. The
    peak of memory is the same (`benchmarks/heap.py`).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    kept = any(mallopt(_MMAP_THRESHOLD, size) for size in _MOST_MMAP)
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and kept


def remember_few_collectives(environ: MutableMapping[str, str]) -> None:
    """Have torch's flight recorder keep the last 64 collectives of a rank on processors, unless the user says how many:
    enough to see where it stood. By default it keeps 2000, small blocks between the tensors' large ones, which so do not
    fit again: the memory of a rank under tp grew to twice what it needs in its first 40 steps. To be called before
    groups are made."""
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
