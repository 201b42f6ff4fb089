"""Kubernetes: manifests of a Job, a JobSet or one of Kubeflow's, which kubectl applies. No torch."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from unisono.spec.errors import UsageError
from unisono_contrib.submit import JobState, Submitter, pods
from unisono_contrib.submit.job import JobFile, JobRequest
from unisono_contrib.submit.kinds import KINDS
from unisono_contrib.submit.script import output_of
from unisono_contrib.submit.yaml import as_yaml

FILE = "job.yaml"
_OURS = ("Job", "JobSet", "TrainJob", "PyTorchJob")
_ENDED = {
    "Complete": JobState.DONE,
    "Completed": JobState.DONE,
    "Succeeded": JobState.DONE,
    "Failed": JobState.FAILED,
}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
"""A label of DNS: names of pods and of the service are made of it, and have at most 63 letters."""


class K8sSubmitter(Submitter):
    """Manifests."""

    name: ClassVar[str] = "k8s"
    arrays: ClassVar[bool] = True

    def files(self, job: JobRequest) -> Sequence[JobFile]:
        return [JobFile(FILE, as_yaml(list(manifests(job))))]

    def submit(self, job: JobRequest, folder: Path) -> str:
        lines = output_of(["kubectl", "apply", "-f", str(folder / FILE), "-o", "name"]).splitlines()
        kinds = tuple(f"{kind.lower()}." for kind in _OURS)
        names = [line for line in lines if line.startswith(kinds)]
        namespace = ["-n", job.k8s.namespace] if job.k8s.namespace else []
        return " ".join([*names, *namespace])

    def state(self, job: str, folder: Path) -> JobState:
        known = json.loads(output_of(["kubectl", "get", *job.split(), "-o", "json"]) or "{}")
        states = {_state_of(item.get("status", {})) for item in known.get("items", [known])}
        for state in (JobState.RUNNING, JobState.PENDING, JobState.FAILED, JobState.DONE):
            if state in states:
                return state
        return JobState.UNKNOWN


def manifests(job: JobRequest) -> Iterator[dict[str, Any]]:
    """All objects of the job, of an array those of each run under a name of its own. Raises UsageError C06."""
    if not _NAME.fullmatch(job.name):
        raise UsageError(
            f"{job.name!r} is no name of a job on Kubernetes", where="name", code="C06",
            fix="--name my-run: small letters, digits and dashes, at most 52",
        )  # fmt: skip
    if not job.k8s.image:
        raise UsageError("a job on Kubernetes has an image", where="k8s.image", code="C06",
                         fix="--k8s.image REGISTRY/NAME:TAG, with Unisono and torch in it")  # fmt: skip
    for number, recipe in enumerate(job.recipes):
        run = job if len(job.recipes) == 1 else replace(job, name=f"{job.name}-{number}")
        yield pods.recipe_map(run, recipe)
        yield from KINDS[job.k8s.kind](run)


def _state_of(status: dict[str, Any]) -> JobState:
    for condition in status.get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in _ENDED:
            return _ENDED[condition["type"]]
    active = status.get("active") or any(
        group.get("active")
        for group in (*(status.get("replicatedJobsStatus") or ()), *(status.get("jobsStatus") or ()),
                      *(status.get("replicaStatuses") or {}).values())
    )  # fmt: skip
    return JobState.RUNNING if active else JobState.PENDING
