"""Ctrl-Z and `fg`: whoever starts processes of a run stops with all of them, and they go on with it. No torch.

Helper and ranks have a session of their own, so that a terminal's Ctrl-C is the supervisor's to hear. So its Ctrl-Z
does not come to them either, and they would compute on.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def stops_with(child: Callable[[], int]) -> Iterator[None]:
    """While open, what stops this process at the terminal (SIGTSTP) stops `child()` too, a process, and all that it has
    started. Outside the main thread nothing is caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTSTP, lambda number, frame: _stop(child()))
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def _stop(child: int) -> None:
    """Stop from above and go on from below: so nobody finds another one stopped, and takes it for lost."""
    family = [child]
    for pid in family:  # which grows
        _send(pid, signal.SIGSTOP)
        family += _children(pid)
    os.kill(os.getpid(), signal.SIGSTOP)
    for pid in reversed(family):
        _send(pid, signal.SIGCONT)


def _children(pid: int) -> list[int]:
    children = list[int]()
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, path.read_text().split())
    return children


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
