"""Ctrl-C, SIGTERM, SIGUSR1 and `kill -9` of the supervisor: what is asked for happens, and nobody stays behind."""

import contextlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Forked
from unisono.launch.signals import TO_RANKS, watch_signals

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).parents[2]


class Run:
    """A supervisor with three ranks that are stepping, and pidfds of everyone in it."""

    def __init__(self, how: str, real: bool) -> None:
        argv = ["-m", "tests.launch.supervised", how]
        self.process: Forked | subprocess.Popen[str]
        if real:
            self.process = subprocess.Popen(
                [sys.executable, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        else:
            self.process = Forked(argv, ROOT, os.environ)
        self.pids: list[int] = []
        self.pidfds: list[int] = []

    def meet(self) -> None:
        """Wait until the helper and all ranks have said who they are."""
        self.pids = [self.line()["pid"] for _ in range(4)]
        self.pidfds = [os.pidfd_open(pid) for pid in self.pids]

    def line(self) -> dict:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def all_gone(self, seconds: float = 20.0) -> bool:
        return all(select.select([fd], [], [], seconds)[0] for fd in self.pidfds)


@contextlib.contextmanager
def begun(how: str, *, real: bool = True) -> Iterator[Run]:
    """A run that has just been started; a test that fails leaves none of it behind. real: it imports torch itself."""
    run = Run(how, real)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        for fd in run.pidfds:
            os.close(fd)


@contextlib.contextmanager
def running(how: str) -> Iterator[Run]:
    with begun(how, real=False) as run:
        run.meet()
        yield run


@pytest.mark.parametrize(
    ("number", "how", "code"),
    [
        (signal.SIGINT, "interrupt", 130),
        (signal.SIGTERM, "terminate", 75),
        (signal.SIGUSR1, "terminate", 75),
        (signal.SIGHUP, "terminate", 75),
    ],
)
def test_one_signal_lets_the_ranks_finish(number: int, how: str, code: int) -> None:
    with running("polite") as run:
        os.killpg(run.process.pid, number)  # as a terminal and as a scheduler do it
        assert run.line() == {"kind": "stopping", "how": how, "rank": -1}
        over = run.line()
        assert (over["exit"], over["stopped"], over["error"]) == (code, how, None)
        steps = [result["steps"] for result in over["results"]]
        assert len(set(steps)) == 1
        assert run.all_gone() and run.process.wait() == 0


def test_a_second_ctrl_c_stops_at_once() -> None:
    with running("deaf") as run:
        run.process.send_signal(signal.SIGINT)
        assert run.line()["kind"] == "stopping"
        run.process.send_signal(signal.SIGINT)
        over = run.line()
        assert over["exit"] == 130 and over["error"] is not None
        assert run.all_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_do_not_end_within_the_grace_are_ended(number: int) -> None:
    """To ask again within the grace changes nothing."""
    with running("graced") as run:
        begun = time.monotonic()
        run.process.send_signal(number)
        assert run.line()["kind"] == "stopping"
        run.process.send_signal(number)
        os.kill(run.pids[1], signal.SIGTERM)
        over = run.line()
        assert over["exit"] == 75 and "the grace of 1.5 s (launch.grace) is over" in over["error"]
        assert time.monotonic() - begun >= 1.5
        assert run.all_gone() and run.process.wait() == 0


def test_a_long_call_keeps_nobody_from_hearing_a_rank_that_was_asked() -> None:
    """Rank 1 waits inside one call, where its main thread runs no handler."""
    with running("stuck") as run:
        os.kill(run.pids[2], signal.SIGTERM)
        assert run.line() == {"kind": "stopping", "how": "terminate", "rank": -1}
        assert run.line()["exit"] == 75
        assert run.all_gone()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_ctrl_c_during_the_import_ends_it_at_once() -> None:
    with begun("polite") as run:
        run.pidfds.append(os.pidfd_open(run.line()["pid"]))
        while not catches(run.process.pid, signal.SIGTERM):  # which nobody does before the supervisor listens
            os.sched_yield()
        run.process.send_signal(signal.SIGINT)
        over = run.line()
        assert over["exit"] == 130 and "before the ranks" in over["error"]
        assert run.all_gone() and run.process.wait() == 0


def test_a_signal_to_the_helper_changes_nothing() -> None:
    with running("polite") as run:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(run.pids[0], number)
        run.process.send_signal(signal.SIGTERM)
        assert run.line()["kind"] == "stopping"
        assert run.line()["exit"] == 75


@pytest.mark.parametrize(
    ("number", "how", "code"),
    [
        (signal.SIGINT, "interrupt", 130),
        (signal.SIGTERM, "terminate", 75),
        (signal.SIGUSR1, "terminate", 75),
    ],
)
def test_a_signal_to_one_rank_stops_all_in_good_order(number: int, how: str, code: int) -> None:
    with running("polite") as run:
        os.kill(run.pids[2], number)
        assert run.line() == {"kind": "stopping", "how": how, "rank": -1}
        over = run.line()
        assert (over["exit"], over["stopped"], over["error"]) == (code, how, None)
        assert len({result["steps"] for result in over["results"]}) == 1


@pytest.mark.parametrize("whole_group", [False, True])
def test_nobody_outlives_a_killed_supervisor(whole_group: bool) -> None:
    with running("deaf") as run:
        if whole_group:
            os.killpg(run.process.pid, signal.SIGKILL)
        else:
            run.process.kill()
        assert run.all_gone()


def test_nobody_outlives_a_killed_helper() -> None:
    with running("deaf") as run:
        os.kill(run.pids[0], signal.SIGKILL)
        over = run.line()
        assert over["exit"] != 0 and over["error"]
        assert run.all_gone()


def forks(how: str) -> tuple[int, list[int]]:
    """The exit status of a process that one with `at_once` has forked, and what that one itself has heard."""
    hears, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        heard: list[int] = []
        watch_signals(heard.append, TO_RANKS)
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        number = signal.SIGTERM if how == "terminate" else signal.Signals[how]
        assert child.pid is not None
        child.terminate() if how == "terminate" else os.kill(child.pid, number)
        child.join(10.0)
        left = child.exitcode
        child.kill()
        os.kill(os.getpid(), signal.SIGUSR1)  # its own it still hears
        while not heard:
            pass
        os.write(says, json.dumps([left, heard]).encode())
        os._exit(0)
    with os.fdopen(hears) as told:
        os.close(says)
        status, heard = json.loads(told.read())
    os.waitpid(pid, 0)
    return status, heard


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("terminate", -signal.SIGTERM),
        ("SIGTERM", -signal.SIGTERM),
        ("SIGUSR1", -signal.SIGUSR1),
        ("SIGINT", -signal.SIGINT),
    ],
)
def test_what_a_forked_process_is_sent_ends_it_and_is_no_word_to_its_parent(how: str, status: int) -> None:
    assert forks(how) == (status, [signal.SIGUSR1])


def test_the_workers_of_a_loader_outlive_what_asks_a_whole_job_to_stop() -> None:
    """A terminal's Ctrl-C comes to them too, under torchrun: the step under way still needs what they read."""
    import torch

    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, at: int) -> int:
            return at

    hears, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        heard: list[int] = []
        watch_signals(heard.append, TO_RANKS)
        batches = iter(
            torch.utils.data.DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="fork")
        )
        for worker in multiprocessing.active_children():
            for number in (signal.SIGINT, signal.SIGUSR1):
                os.kill(worker.pid or 0, number)
        read = [batch.tolist() for batch in batches]
        os.write(says, json.dumps([read, heard]).encode())
        os._exit(0)
    with os.fdopen(hears) as told:
        os.close(says)
        assert json.loads(told.read()) == [[[0, 1], [2, 3], [4, 5], [6, 7]], []]
    os.waitpid(pid, 0)
