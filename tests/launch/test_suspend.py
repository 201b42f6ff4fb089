"""Ctrl-Z at the terminal stops all processes of a run, whatever their session, and `fg` lets them go on."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from unisono.launch.rank_status import process_state
from unisono.launch.suspend import stops_with

pytestmark = pytest.mark.timeout(60)


def test_what_stops_one_stops_all_that_it_has_started() -> None:
    (asks, asked), (hears, answers) = os.pipe(), os.pipe()
    first = os.fork()
    if first == 0:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.fork()  # and one below it: both answer
            while os.read(asks, 1):
                os.write(answers, b"+")
            os._exit(0)
        with stops_with(lambda: child):
            os.write(answers, b"+")
            while True:
                signal.pause()
    below: list[int] = []
    try:
        assert os.read(hears, 1) == b"+"
        os.write(asked, b"..")
        assert os.read(hears, 1) + os.read(hears, 1) == b"++"  # both are there
        below = [int(pid) for one in [first, *_children(first)] for pid in _children(one)]
        os.kill(first, signal.SIGTSTP)
        os.waitid(os.P_PID, first, os.WSTOPPED)
        assert len(below) == 2
        _until_stopped(below)
        os.kill(first, signal.SIGCONT)
        os.write(asked, b"..")
        assert os.read(hears, 1) + os.read(hears, 1) == b"++"
    finally:
        for pid in {*below, *_children(first), first}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(asked)
        os.waitpid(first, 0)


def _until_stopped(pids: list[int], seconds: float = 30.0) -> None:
    """The kernel stops a process when it runs next."""
    until = time.monotonic() + seconds
    while [process_state(pid) for pid in pids] != ["T"] * len(pids):
        assert time.monotonic() < until, [process_state(pid) for pid in pids]
        os.sched_yield()


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
