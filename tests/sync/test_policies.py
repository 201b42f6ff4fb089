"""Policies as ranks on threads play them: what all hold after a step, in which bits, and what they say it costs."""

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.tree import tree_sum
from unisono.config import Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.spec.errors import ConfigProblems
from unisono.spec.fidelity import Fidelity
from unisono.sync import POLICIES, Verdict
from unisono_contrib.comm.threads import run

SAME = (name for name in POLICIES.names() if POLICIES.find(name).equal and not POLICIES.find(name).lazy)
SUMS = (name for name in SAME if name != "adasum")  # the others: test_rounds, test_lag, test_adasum
EQUAL = ["delayed:lag=0" if name == "delayed" else name for name in SUMS]


def gradients(rank: int, sizes: list[int]) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank + 1)
    return [torch.randn(size, generator=drawn) for size in sizes]


def step(rank: int, ranks: int, name: str, sizes: list[int]) -> dict[str, Any]:
    """One step of a policy over two buckets, which are ready one after the other."""
    recorder = Recorder(rank)
    mesh = Mesh(Shape(dp=ranks), rank, recorder, timedelta(seconds=30))
    sync = POLICIES.read(name).bind([], mesh.dp, None)
    buckets = []
    weight = sync.weigh(10)
    for size, grad in zip(sizes, gradients(rank, sizes), strict=True):
        p = nn.Parameter(torch.zeros(size))
        bucket = Bucket([p], multiple=ranks, over=mesh.dp)
        p.grad = grad * weight
        bucket.gather()
        buckets.append(bucket)
    before = sum(recorder.bytes().values())
    for bucket in buckets:
        sync.grad_ready(bucket)
    verdict = sync.settle()
    sync.after_update(0)
    nbytes = sum(bucket.flat.nbytes for bucket in buckets)
    return {
        "verdict": verdict,
        "sums": [bucket.body.clone() for bucket in buckets],
        "sent": sum(recorder.bytes().values()) - before,
        "said": sum(call.nbytes * call.times for call in POLICIES.read(name).work(nbytes, ranks).calls),
        "state": dict(sync.state()),
    }


@pytest.mark.parametrize("name", EQUAL)
@settings(max_examples=8, deadline=None)
@given(
    ranks=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=3),
    seed=st.integers(0, 99),
)
def test_replicas_hold_the_weighted_sum_and_all_the_same_bits(name, ranks, sizes, seed):
    policy = POLICIES.read(name)
    ended = run(ranks, lambda rank: step(rank, ranks, name, sizes), seed=seed)
    for i, size in enumerate(sizes):
        parts = [gradients(rank, sizes)[i] / (10 * ranks) for rank in range(ranks)]
        for end in ended:
            assert end["verdict"] is Verdict.APPLY and end["sums"][i].shape == (size,)
            torch.testing.assert_close(end["sums"][i], torch.stack(parts).sum(0))
            if policy.equal:
                assert torch.equal(end["sums"][i], ended[0]["sums"][i])


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("ranks", [2, 4])
def test_it_sends_what_it_says(name, ranks):
    sizes = [100_000, 128]  # small sums in memory go by messages, in one round and more bytes
    for end in run(ranks, lambda rank: step(rank, ranks, name, sizes)):
        assert end["sent"] == pytest.approx(end["said"], rel=0.02)


def test_canonical_adds_along_the_tree_and_the_others_need_not():
    """The same numbers in another order: only a policy that promises the bits gives those of the tree."""
    sizes = [40_000, 3]
    parts = [torch.stack([gradients(rank, sizes)[0] * (1 / 40) for rank in range(4)])]
    (tree,) = [tree_sum(part.unbind(0)) for part in parts]
    same = {
        name: torch.equal(run(4, lambda rank, name=name: step(rank, 4, name, sizes))[0]["sums"][0], tree)
        for name in EQUAL
    }
    assert same["canonical"]
    assert all(same[name] for name in same if POLICIES.read(name).fidelity is Fidelity.EXACT)


@pytest.mark.parametrize(
    ("batch", "micro", "ranks"), [(12, 1, 2), (28, 2, 2), (12, 1, 4), (40, 1, 8), (36, 2, 6)]
)
def test_the_remedy_of_canonical_for_odd_numbers_of_micro_batches_can_be_followed(
    batch: int, micro: int, ranks: int
) -> None:
    """It used to say micros=4 where no micro-batch makes four of them."""

    def asked(plan: str, size: int) -> list[str]:
        recipe = Recipe(train=TrainConfig(global_batch=batch, micro_batch=size))
        try:
            resolve(recipe, plan)
        except ConfigProblems as found:
            return [problem.fix for problem in found.problems]
        return []

    (fix,) = asked(f"dp={ranks} sync=canonical", micro)
    size, others = re.findall(r"micro_batch (\d+)", fix), re.findall(r"dp=(\d+)", fix)
    assert len(size) == 1 and not asked(f"dp={ranks} sync=canonical", int(size[0]))
    assert others and not asked(f"dp={others[0]} sync=canonical", micro)
