"""Processes that end with the one that started them. No torch."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def set_parent_death_signal(parent: int, libc: ctypes.CDLL) -> None:
    """Ask the kernel to kill this process when `parent` dies; leave at once if it already has."""
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
