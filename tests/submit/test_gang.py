"""Two jobs on one cluster, by the manifests that `unisono launch k8s` writes: with a gang none waits for the other
while it holds what the other needs."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.submit.gang import Pods, play
from tests.submit.jobs import job
from unisono_contrib.submit.job import JobRequest, NodeNeed
from unisono_contrib.submit.kinds import KINDS

PAIRS = 1000


def spread(base: JobRequest, gang: str, nodes: int, gpus: int) -> Pods:
    """The pods of such a job, by its manifests."""
    made = replace(
        base, nodes=nodes, need=NodeNeed(1, 100, gpus), k8s=base.k8s.model_copy(update={"gang": gang})
    )
    return Pods.of(KINDS[base.k8s.kind](made))


def ends(folder: Path, kind: str, gang: str) -> tuple[Counter[str], int]:
    """(how random pairs end, how many jobs held some of their pods and not all). Each job alone has room."""
    base = job(folder, more=f'[k8s]\nimage = "a"\nkind = "{kind}"')
    seen, half = Counter[str](), 0
    for seed in range(PAIRS):
        rng = random.Random(seed)
        sizes = [rng.choice((4, 8)) for _ in range(rng.randint(2, 6))]
        jobs = list[Pods]()
        for _ in range(2):
            gpus = rng.choice((1, 2, 4))
            jobs.append(spread(base, gang, rng.randint(1, sum(size // gpus for size in sizes)), gpus))
        seen[play(jobs, sizes, seed)] += 1
        half += sum(one.half for one in jobs)
    return seen, half


@pytest.mark.parametrize(("kind", "gang"), [("job", "scheduling"), ("job", "podgroup"), ("jobset", "plugin")])
def test_with_a_gang_no_pair_of_jobs_locks_up_or_starts_by_half(tmp_path: Path, kind: str, gang: str) -> None:
    assert ends(tmp_path, kind, gang) == (Counter(done=PAIRS), 0)


def test_without_a_gang_some_do(tmp_path: Path) -> None:
    seen, half = ends(tmp_path, "job", "none")
    assert seen["deadlock"] > 1 and half > seen["deadlock"]
