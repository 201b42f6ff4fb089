"""Trials as tasks of Ray, on the cluster that `RAY_ADDRESS` names or else on one that is started here.

A task takes as many CPUs, or GPUs, of the cluster as its trial has ranks, and starts `unisono train` where Ray puts it.
The sweep's folder must be the same on all hosts. What Ray does not do is left to the sweep: it tries again what failed,
also where a host of the cluster is lost.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from unisono_contrib.launch.ray_cluster import connected, library
from unisono_contrib.sweep.places import TrialPlace
from unisono_contrib.sweep.room import Need, only_gpus
from unisono_contrib.sweep.trial import PieceOutcome, TrialJob, start

_STOP = "stop"
"""In a trial's folder: the task that trains it is asked to save and end. Ray's own cancelling kills what it started."""
_LOOK = 0.1  # seconds between two looks at that, and at tasks


def piece(job: TrialJob, folder: str) -> PieceOutcome:
    """Train a piece, inside a worker of Ray. folder: where the sweep was started."""
    os.chdir(folder)
    stop = Path(job.folder, _STOP)
    gpus = [str(gpu) for gpu in library().get_gpu_ids()]
    process = start(replace(job, environ={**job.environ, **only_gpus(gpus)}))
    try:
        while (outcome := process.wait(_LOOK)) is None:
            if stop.exists() and not process.stopping:
                process.stop()
        return outcome
    finally:
        if process.process.poll() is None:
            process.kill()


class RayWorkers:
    """Trials under way on a cluster, by their tasks."""

    def __init__(self, ray: Any) -> None:
        self.ray, self.tasks = ray, dict[Any, TrialJob]()
        self._piece = ray.remote(max_retries=0)(piece)

    def start(self, job: TrialJob, need: Need) -> None:
        Path(job.folder, _STOP).unlink(missing_ok=True)
        resources = {"num_gpus": need.gpus, "num_cpus": 0} if need.gpus else {"num_cpus": need.cores}
        task = self._piece.options(name=f"trial-{job.number:03}", **resources).remote(job, os.getcwd())
        self.tasks[task] = job

    def ended(self) -> Iterator[tuple[int, PieceOutcome]]:
        ready = list[Any]()
        while not ready:  # a signal that comes while Ray waits is heard after it
            try:
                ready, _ = self.ray.wait([*self.tasks], num_returns=1, timeout=_LOOK)
            except SystemError as error:  # what a handler of a signal has raised inside of Ray
                raise error.__cause__ or error from None
        for task in ready:
            yield self.tasks.pop(task).number, self._outcome(task)

    def _outcome(self, task: Any) -> PieceOutcome:
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayError as error:  # the worker or its host has gone
            return PieceOutcome(why=f"Ray: {str(error).strip().splitlines()[0]}", again=True)

    def stop(self, grace: float) -> None:
        """Ask all to save and end; what is left after `grace` seconds is cancelled by force."""
        for job in self.tasks.values():
            Path(job.folder, _STOP).touch()
        until = time.monotonic() + grace + 5.0
        with contextlib.suppress(self.ray.exceptions.RayError):
            if self.tasks:
                self.ray.wait(
                    [*self.tasks], num_returns=len(self.tasks), timeout=max(0.0, until - time.monotonic())
                )
        for task in self.tasks:
            self.ray.cancel(task, force=True)


class RayPlace(TrialPlace):
    """Tasks of Ray, local or on a cluster."""

    name: ClassVar[str] = "ray"

    @contextmanager
    def open(self, grace: float) -> Iterator[RayWorkers]:
        with connected("--on ray", "--on local does without", log_to_driver=False) as ray:
            workers = RayWorkers(ray)
            try:
                yield workers
            finally:
                workers.stop(grace)
