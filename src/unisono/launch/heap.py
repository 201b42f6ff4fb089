"""Memory that a rank frees stays with it. No torch."""

import ctypes

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
