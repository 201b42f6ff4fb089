"""Ranks on this host, forked from one process that has imported torch. No torch here.

    with Nursery("my.module:train") as nursery:
        outcome = nursery.run({"steps": 10}, ranks=4)

Four ranks are ready in the time of one import, several runs share it, no port is opened, and nothing outlives this
process: the helper dies with it and the ranks with the helper (see `helper`).
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from unisono.launch.advice import Adviser
from unisono.launch.company import Company
from unisono.launch.crew import Crew
from unisono.launch.hosts import OwnHost
from unisono.launch.malloc_tuning import with_huge_pages
from unisono.launch.outcome import Outcome, of_helper
from unisono.launch.pace import StepPace
from unisono.launch.recovery import Recovery
from unisono.launch.signals import Signals
from unisono.launch.spread import RunSpread
from unisono.launch.supervise import OnEvent, Supervision
from unisono.launch.suspend import stops_with
from unisono.launch.verdict import how_died
from unisono.spec.errors import UsageError
from unisono.spec.settings import tell


class Nursery:
    """Starts the helper at once, so that its import runs beside whatever the caller does next.

    entry: names `function(ctx, argument, shared) -> dict | None`, which runs in every rank. If the same module has
    `prepare(argument)`, it runs in the helper before each fork, and its result is `shared`.
    path: folders that come first in the ranks' import path.

    Make it in a thread that outlives it: Linux ends the helper with that thread. Raises UsageError where the kernel
    lacks what this needs: then use torchrun.
    """

    def __init__(self, entry: str, python: str = sys.executable, path: Sequence[str] = ()) -> None:
        if not hasattr(os, "pidfd_open"):
            raise UsageError(
                "starting ranks needs Linux 5.4 or newer",
                fix="start the same command with torchrun, which is recognised",
                code="L04",
            )
        self._start = (entry, python, list(path))
        self._control, self._process = start_helper(*self._start)

    @property
    def pid(self) -> int:
        """The helper's process."""
        return self._process.pid

    def run(
        self,
        argument: dict[str, Any],
        ranks: int,
        threads: int | None = 1,
        on_event: OnEvent | None = None,
        timeout: float | None = None,
        backend: str = "auto",
        recovery: Recovery | None = None,
        grace: float | None = None,
        company: Company | None = None,
        adviser: Adviser | None = None,
        spread: RunSpread | None = None,
        serves: int | None = None,
    ) -> Outcome:
        """Run the entry function in `ranks` forked processes and watch them to the end.

        `on_event(rank, event)` hears what ranks send, what they print (`kind="output"`), and as rank -1 the helper
        and a request to stop. `timeout`: seconds that a rank may keep the others
        waiting; by the run's own steps if None (`pace`). recovery: replaces ranks that are lost; without it a lost rank
        ends the run. company: other hosts, on which some of the ranks are. adviser: whom to
        ask for a better spread. serves: ranks for which a backend of `auto` is to do, if more than these: runs whose
        numbers are compared compute on one kind of device.
        Ctrl-C, SIGTERM and SIGUSR1 ask the ranks to stop; a second Ctrl-C kills them, and so do `grace` seconds after
        one of the others. Failures are in the Outcome.
        """
        if ranks < 1:
            raise UsageError(f"cannot start {ranks} ranks", fix="launch.ranks of 1 or more", code="L02")
        name = socket.gethostname()
        terms = {
            "backend": backend,
            "serves": serves,
            "token": secrets.token_hex(16),
            "timeout": timeout,
            "recovers": recovery is not None,
        }
        hear = on_event or print_output
        try:
            with Signals() as signals, stops_with(lambda: self.pid):
                while True:
                    own = OwnHost(
                        name, company.room if company else ranks, cores(), self._control, self._process.kill
                    )
                    watch = Supervision(hear, StepPace(timeout), name, recovery, grace, company, adviser)
                    crew = Crew(
                        watch.board, spread or RunSpread("", ranks), terms, argument, {0: own}, threads
                    )
                    if company is not None:
                        company.wait()
                        crew.choice, crew.leads = company.choice, company.reception.address
                    outcome = watch.watch(crew, signals)
                    if recovery is None or watch.stopped or not of_helper(outcome) or not recovery.may():
                        return outcome
                    self._again(recovery, ranks, hear)
        finally:
            if company is not None:
                company.close()
            if adviser is not None:
                adviser.close()

    def _again(self, recovery: Recovery, ranks: int, hear: OnEvent) -> None:
        """The helper was killed, and the ranks with it: another one is to fork all of them anew."""
        epoch, how = recovery.change(ranks, anew=True), how_died(self._process.wait())
        self._control.close()
        self._control, self._process = start_helper(*self._start)
        hear(-1, {"kind": "members", "epoch": epoch, "lost": {"helper": how}, "born": list(range(ranks))})

    def close(self) -> None:
        """End the helper and with it all ranks; harmless when repeated."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def start_helper(
    entry: str, python: str = sys.executable, path: Sequence[str] = ()
) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """The line to a new helper, which imports from now on, and its process."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    terms = {"entry": entry, "control": theirs.fileno(), "parent": os.getpid(), "path": list(path)}
    # One thread in numpy's BLAS, whose pool would otherwise start at import and not survive the fork; asking
    # the driver's library for GPUs instead of CUDA itself, which cannot be used in a child once touched.
    extra = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with theirs:
        process = subprocess.Popen(
            # -P: the current folder must not be able to shadow a module of ours or of torch's.
            [python, "-P", "-m", "unisono.launch.helper", json.dumps(terms)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an import prints is no data
            pass_fds=[theirs.fileno()],
            env={**extra, **os.environ, **with_huge_pages(os.environ)},
            start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to hear
        )
    return control, process


def cores() -> int:
    """Of this host, that this process may use."""
    return len(os.sched_getaffinity(0))


def print_output(rank: int, event: dict[str, Any]) -> None:
    """What becomes of ranks' output and notes when nobody asked for it: standard error, with the rank in front."""
    if event["kind"] in ("output", "note"):
        tell(f"rank {rank} | {event['text']}")
