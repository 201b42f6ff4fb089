"""Slurm: a batch script whose tasks are ranks, started again by itself after it has saved. No torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from unisono.spec.errors import UsageError
from unisono.spec.hostlist import hosts_in
from unisono_contrib.submit import JobState, Submitter
from unisono_contrib.submit.job import JobFile, JobRequest
from unisono_contrib.submit.script import WAIT, command, exports, output_of, recipes, trap

FILE = "job.sbatch"
_STATES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"), JobState.PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT"), JobState.RUNNING),
    "COMPLETED": JobState.DONE,
    "CANCELLED": JobState.STOPPED,
}
_REQUEUE = """\
if [ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    if command -v scontrol >/dev/null; then scontrol requeue "$SLURM_JOB_ID" && exit 75; fi
    echo 'saved, and not started again: this node has no scontrol; slurm.requeue = "chain" does without' >&2
fi"""


class SlurmSubmitter(Submitter):
    """A batch script."""

    name: ClassVar[str] = "slurm"
    arrays: ClassVar[bool] = True

    def files(self, job: JobRequest) -> Sequence[JobFile]:
        nodes = hosts_in(job.slurm.nodelist)
        if job.slurm.nodelist and len(nodes) < job.nodes:
            raise UsageError(
                f"{job.slurm.nodelist} names {len(nodes)} nodes, and the job takes {job.nodes}", code="C06",
                where="slurm.nodelist, job.nodes", fix="more nodes in the list, or fewer in the job",
            )  # fmt: skip
        lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives(job)), "", *_body(job)]
        return [JobFile(FILE, "\n".join(lines) + "\n")]

    def submit(self, job: JobRequest, folder: Path) -> str:
        command = ["sbatch", "--parsable"]
        ids = [_submitted([*command, str(folder / FILE)])]
        for _ in range(job.config.restarts if job.slurm.requeue == "chain" else 0):
            after = [f"--dependency=afternotok:{ids[-1]}", "--kill-on-invalid-dep=yes"]
            ids.append(_submitted([*command, *after, str(folder / FILE)]))
        return " ".join(ids)

    def state(self, job: str, folder: Path) -> JobState:
        states = [state for number in job.split() for state in _states(number)]
        for state in (JobState.RUNNING, JobState.PENDING, JobState.DONE, JobState.FAILED, JobState.STOPPED):
            if state in states:
                return state
        return JobState.UNKNOWN


def directives(job: JobRequest) -> Iterator[str]:
    """Options of sbatch, in the order of their weight."""
    config, need = job.slurm, job.need
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    yield f"--cpus-per-task={need.cores // job.ranks_per_node}"
    yield f"--mem={need.mib}M"
    if need.gpus:
        yield f"--gpus-per-node={need.gpus}"
    known = {
        "time": job.config.time, "partition": config.partition, "account": config.account, "qos": config.qos,
        "constraint": config.constraint, "nodelist": config.nodelist, "signal": config.signal,
    }  # fmt: skip
    yield from (f"--{name}={value}" for name, value in known.items() if value)
    yield "--requeue" if config.requeue == "scontrol" else "--no-requeue"
    yield "--open-mode=append"
    array = len(job.recipes) > 1
    yield f"--output={job.name}-{'%A_%a' if array else '%j'}.out"
    if array:
        yield f"--array=0-{len(job.recipes) - 1}{f'%{config.at_once}' if config.at_once else ''}"
    yield from config.options


def _body(job: JobRequest) -> Iterator[str]:
    config = job.slurm
    yield from job.config.setup
    yield from exports(job.variables)
    # The first job of a chain has other numbers than the next; the recipe is the same.
    yield from recipes(job, "$SLURM_JOB_ID", "$SLURM_ARRAY_TASK_ID")
    # The trap is for the batch script alone; Slurm signals the tasks itself unless slurm.signal has B.
    yield from trap("TERM", job.slurm.trapped or "USR1")
    # Since 22.05 a step does not take over the cores of its job's tasks by itself.
    cores = job.need.cores // job.ranks_per_node
    yield f"srun --kill-on-bad-exit=1 --cpus-per-task={cores} \\"
    yield f"    {command(job.train('$recipe', grace_of(job)), job.python)} &"
    yield WAIT
    if config.requeue == "scontrol":
        yield _REQUEUE.format(restarts=job.config.restarts)
    yield 'exit "$code"'


def grace_of(job: JobRequest) -> float:
    """Seconds that ranks have to save: the recipe's, but no more than three quarters of what Slurm gives."""
    warning = job.slurm.warning
    return job.grace if warning is None else min(job.grace, 0.75 * warning)


def _submitted(words: Sequence[str]) -> str:
    return output_of(words).partition(";")[0]


def _states(job: str) -> Iterator[JobState]:
    """Of a job and the tasks of its array: those of the queue, or else of the accounts."""
    try:
        words = output_of(["squeue", "-h", "-r", "-j", job, "-o", "%T"]).split()
    except UsageError as error:
        if not error.what.startswith("squeue refused"):
            raise
        words = []  # it forgets a job minutes after its end
    if not words:
        try:
            words = output_of(["sacct", "-n", "-X", "-P", "-j", job, "-o", "State"]).splitlines()
        except UsageError:
            words = []  # a site without accounts
    for word in words:
        yield _STATES.get(word.split()[0], JobState.FAILED)
