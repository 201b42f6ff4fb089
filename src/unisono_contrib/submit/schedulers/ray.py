"""Ray: a script whose driver makes one actor a rank, for `ray job submit` or a shell on the cluster. No torch."""

import shlex
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import ClassVar

from unisono_contrib.submit import JobState, Submitter
from unisono_contrib.submit.job import JobFile, JobRequest
from unisono_contrib.submit.script import WAIT, command, output_of, recipes, trap

FILE = "job.sh"
_STATES = {
    "PENDING": JobState.PENDING, "RUNNING": JobState.RUNNING, "SUCCEEDED": JobState.DONE,
    "STOPPED": JobState.STOPPED, "FAILED": JobState.FAILED,
}  # fmt: skip


class RaySubmitter(Submitter):
    """A script that is a driver."""

    name: ClassVar[str] = "ray"

    def files(self, job: JobRequest) -> Sequence[JobFile]:
        return [JobFile(FILE, "\n".join(["#!/bin/bash", *_body(job)]) + "\n")]

    def submit(self, job: JobRequest, folder: Path) -> str:
        words = ["ray", "job", "submit", "--no-wait", "--working-dir", ".", "--", "bash", str(folder / FILE)]
        said = output_of(words)
        return next(
            (word.strip("'") for word in said.split() if word.strip("'").startswith("raysubmit_")), said
        )

    def state(self, job: str, folder: Path) -> JobState:
        said = output_of(["ray", "job", "status", job])
        return next(
            (_STATES[word] for word in said.replace("'", " ").split() if word in _STATES), JobState.UNKNOWN
        )


def _body(job: JobRequest) -> Iterator[str]:
    yield from job.config.setup
    yield from recipes(job, "ray", "0")
    yield from trap("TERM", "USR1", "INT")
    each, need = job.ranks_per_node, job.need
    driver = {
        "--ranks": job.world, "--cpus": need.cores // each, "--gpus": ceil(need.gpus / each),
        "--mib": ceil(need.mib / each), "--restarts": job.config.restarts,
    }  # fmt: skip
    words = [word for name, value in driver.items() for word in (name, str(value))]
    # Ray's workers, on other hosts too, do not have what this script exports.
    words += [word for name, value in job.variables.items() for word in ("--env", f"{name}={value}")]
    yield f"{shlex.quote(job.python)} -m unisono_contrib.launch.on_ray {shlex.join(words)} -- \\"
    yield f"    {command(job.train('$recipe', job.grace))} &"
    yield WAIT
    yield 'exit "$code"'
