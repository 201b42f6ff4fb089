"""Processes that end with the one that started them. No torch.

`python -m unisono.launch.parent PID COMMAND...` is the command, and is killed when the process PID, its parent, dies.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def set_parent_death_signal(parent: int, libc: ctypes.CDLL) -> None:
    """Ask the kernel to kill this process when `parent` dies; leave at once if it already has."""
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    set_parent_death_signal(int(sys.argv[1]), ctypes.CDLL(None))
    os.execv(sys.argv[2], sys.argv[2:])  # what is asked of the kernel stays
