"""Code that knows nothing of us is proved too, and its bugs are named."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

import unisono
from tests.threads import ThreadForkServer
from tests.verify import loops
from unisono.library.gradient_check import ENTRY, check_on, judge
from unisono.spec.errors import UsageError, UserCodeError, VerifyMismatch

pytestmark = pytest.mark.timeout(180)

CUT = {"up": Shard(0), "down": Shard(1)}


@pytest.fixture(scope="module")
def check():
    return partial(check_on, ThreadForkServer(ENTRY))


def test_the_public_call():
    assert unisono.check_gradients(loops.shares, loops.ddp)


@pytest.mark.parametrize("candidate", [loops.ddp, loops.fsdp])
def test_right_loops_pass(candidate, check):
    verdict = check(loops.whole, candidate)
    assert verdict and verdict.bound < 1e-10, verdict
    assert next(iter(verdict.errors)) == "0.weight"
    verdict.check()


def test_a_split_layer_passes_when_told_how_it_is_cut(check):
    assert check(loops.layer, loops.split, layout=CUT)
    with pytest.raises(UsageError, match=r"up is \[4, 5\] on 2 ranks and \[8, 5\] on one device"):
        check(loops.layer, loops.split)


@pytest.mark.parametrize(
    ("candidate", "cause", "words"),
    [
        (loops.ddp_mean_forgotten, "factor_of_axis", "every gradient is 3 times the right one"),
        (
            loops.ddp_sync_on_the_first,
            "missing_micro_batch",
            "on rank 0 share 4, 5 of the batch is missing, share 1, 2 counts 2",
        ),
        (loops.ddp_never_synced, "not_reduced", "each rank keeps its own, and their mean is right"),
        (loops.ddp_zeroed_between, "missing_micro_batch", "share 0, 1, 3, 4 of the batch is missing"),
        (loops.ddp_rounded, "precision_lost", "bfloat16"),
        (loops.fsdp_summed, "factor_of_axis", "2 times the right one, as many as the ranks (2)"),
    ],
)
def test_wrong_loops_are_caught_and_the_cause_is_named(candidate, cause, words, check):
    verdict = check(loops.shares, candidate)
    assert not verdict and verdict.cause == cause and verdict.first == "4.bias", verdict
    assert words in str(verdict)
    with pytest.raises(VerifyMismatch):
        verdict.check()


def test_a_missing_sum_in_a_split_layer_is_seen_in_front_of_it(check):
    verdict = check(loops.layer, loops.split_without_backward_sum, layout=CUT)
    assert verdict.first == "inner" and verdict.cause == "not_reduced", verdict


def test_functions_that_do_not_fit_are_refused(check):
    with pytest.raises(UsageError, match="cannot be found by another process"):
        check(loops.whole, lambda rank: {})
    with pytest.raises(UsageError, match="do not divide"):
        check(loops.whole, loops.ddp, ranks=2, shards=3)
    with pytest.raises(UserCodeError, match="returned Sequential, not a mapping"):
        check(loops.model, loops.ddp)


# The comparison alone ------------------------------------------------------------------------------------------------


def made():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(s, generator=generator, dtype=torch.float64)
        for name, s in (("a", (9, 7)), ("b", (9,)))
    }


def judged(change, ranks=2):
    seen = [{name: x.clone() for name, x in made().items()} for _ in range(ranks)]
    change(seen)
    return judge([made()], seen, {}, ranks, 64)


def test_an_entry_off_by_1e_9_of_the_largest_is_seen():
    def change(seen):
        for rank in seen:
            rank["a"][3, 2] += 1e-9 * rank["a"].abs().max()

    assert judged(lambda seen: None)
    verdict = judged(change)
    assert verdict.first == "a" and verdict.cause == "few_elements" and "1 of 63 entries" in str(verdict)


def test_what_is_wrong_on_one_rank_or_in_another_place_is_told():
    assert judged(lambda seen: seen[1]["b"].add_(torch.arange(9.0))).cause == "replicas_drifted"
    assert judged(lambda seen: [rank.update(a=rank["a"].flip(0)) for rank in seen]).cause == "permuted"
    assert judged(lambda seen: [rank["b"].fill_(float("nan")) for rank in seen]).cause == "not_a_number"
    with pytest.raises(UsageError, match="rank 1 lacks b"):
        judged(lambda seen: seen[1].pop("b"))


def test_cut_gradients_are_told_by_who_holds_what():
    """a is cut by rows over two ranks, b a sum of two; both for two replicas."""

    def verdict(change):
        right = made()
        halves = [
            {"a": a.clone(), "b": b}
            for a, b in zip(right["a"].split([5, 4]), (right["b"] / 4, right["b"] * 3 / 4), strict=True)
        ]
        seen = [{n: x.clone() for n, x in half.items()} for _ in range(2) for half in halves]
        change(seen)
        return judge([made()], seen, {"a": Shard(-2), "b": Partial()}, 2, 64)

    assert verdict(lambda seen: None)
    noise = torch.rand(4, 7)
    slice_ = verdict(lambda seen: [seen[rank]["a"].add_(noise) for rank in (1, 3)])
    assert slice_.cause == "rank_slice" and "rank 1, 3" in str(slice_), slice_
    apart = verdict(
        lambda seen: [seen[rank]["a"].mul_(weight) for rank, weight in enumerate((0.2, 0.3, 0.8, 0.7))]
    )
    assert apart.cause == "not_reduced" and "their sum is right" in str(apart), apart
    twice = verdict(lambda seen: [rank["b"].mul_(2) for rank in seen])
    assert twice.cause == "factor_of_axis" and "the ranks of one replica (2)" in str(twice), twice


# A user's model under our plans --------------------------------------------------------------------------------------


def test_a_model_of_ones_own_is_proved_under_a_plan():
    proof = unisono.prove(loops.tokens, "dp=2 pp=1", steps=1)
    assert proof and proof.ranks == 2, proof
    assert not replace(proof, passed=False)
