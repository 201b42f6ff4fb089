"""A small scheduler of pods, to see what manifests of two jobs come to on one cluster."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pods:
    """The pods of a job as its manifests describe them. least: how many are placed at once, or none. placed: by node."""

    wanted: int
    gpus: int
    least: int
    placed: list[int] = field(default_factory=list)
    left: int = 0
    runs: bool = False
    done: bool = False
    half: bool = False

    @classmethod
    def of(cls, manifests: Sequence[Mapping[str, Any]]) -> "Pods":
        """Of a Job or a JobSet, with the gang that one of these objects asks for; 1 without."""
        kinds = {manifest["kind"]: manifest for manifest in manifests}
        spec = (kinds.get("Job") or kinds["JobSet"])["spec"]
        spec = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
        group = kinds.get("PodGroup", {}).get("spec", {})
        policy = group.get("schedulingPolicy") or spec.get("scheduling", {}).get("schedulingPolicy", {})
        least = group.get("minMember") or policy.get("gang", {}).get("minCount") or 1
        if "PodGroup" in kinds:  # a group holds the pods that name it, and no others
            name, template = kinds["PodGroup"]["metadata"]["name"], spec["template"]
            named = {
                template["spec"].get("schedulingGroup", {}).get("podGroupName"),
                *template["metadata"]["labels"].values(),
            }
            least = least if name in named else 1
        gpus = int(spec["template"]["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"])
        return cls(spec["completions"], gpus, least)


def play(jobs: Sequence[Pods], nodes: Sequence[int], seed: int, steps: int = 400) -> str:
    """What becomes of jobs on nodes of so many GPUs: "done", or "deadlock" if no pod can be placed and no job runs.
    Pods are tried in a random order. A job runs for some steps once all its pods are placed."""
    rng, free = random.Random(seed), [*nodes]
    for _ in range(steps):
        moved = False
        for job in rng.sample([*jobs], len(jobs)):
            if job.runs:
                job.left, moved = job.left - 1, True
                if not job.left:
                    job.runs, job.done = False, True
                    for node in job.placed:
                        free[node] += job.gpus
            elif not job.done:
                moved |= _place(job, free, rng)
        if all(job.done for job in jobs):
            return "done"
        if not moved:
            return "deadlock"
    return "late"


def _place(job: Pods, free: list[int], rng: random.Random) -> bool:
    """Place as many pods at once as the gang says, all or none."""
    count = min(job.least, job.wanted - len(job.placed))
    chosen: list[int] = []
    for _ in range(count):
        fits = [node for node, gpus in enumerate(free) if gpus >= job.gpus]
        if not fits:
            for node in chosen:
                free[node] += job.gpus
            return False
        chosen.append(rng.choice(fits))
        free[chosen[-1]] -= job.gpus
    job.placed += chosen
    job.half |= len(job.placed) < job.wanted
    if len(job.placed) == job.wanted:
        job.runs, job.left = True, rng.randint(1, 5)
    return True
