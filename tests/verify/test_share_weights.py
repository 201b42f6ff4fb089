"""A mixture of right shares has a cause by how often each counts, and no other mixture gets it."""

import pytest
import torch

from unisono.library.gradient_check import judge

RANKS, MICROS = 2, 3


def said(*weights):
    """The verdict on a gradient in which each share counts so often."""
    draws = torch.Generator().manual_seed(0)
    shares = [{"a": torch.randn(9, 7, generator=draws, dtype=torch.float64)} for _ in weights]
    got = {"a": sum(w * share["a"] for w, share in zip(weights, shares, strict=True))}
    return judge(shares, [got] * RANKS, {}, RANKS, 64)


@pytest.mark.parametrize(
    ("weights", "cause", "words"),
    [
        ((8, 4, 2) * 2, "rescaled_each_micro_batch", "multiplies what was there before it by 2"),
        ((1 / 9, 1 / 3, 1) * 2, "rescaled_each_micro_batch", "by 0.3333"),
        ((1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1), "rescaled_each_micro_batch", "by 0.5"),
        ((8, 4, 3) * 2, "counted_twice", "counts 8 times"),
        ((1, 1, 2, 1, 1, 1), "counted_twice", "share 2 counts 2 times"),
        ((1, 1, 0.5, 1, 1, 1), "factor", "share 2 counts 0.5 times"),
        ((0, 0, 1) * 2, "missing_micro_batch", "share 0, 1, 3, 4 of the batch is missing"),
        ((2, 2, 2, 0, 0, 0), "leaf_twice", "ranks read the samples of others"),
        ((0, 0, 3) * 2, "leaf_twice", "counts 3 times"),
        ((0, 0, 1.5) * 2, "missing_micro_batch", "counts 1.5 times"),
    ],
)
def test_how_often_shares_count_says_why(weights, cause, words):
    verdict = said(*weights)
    assert verdict.cause == cause and words in verdict.explanation, verdict


@pytest.mark.parametrize("counts", [(6, 5, 4, 3, 2, 1), (7, 7, 7, 7, 7, 1), (10, 10, 10, 2, 2, 2)])
def test_means_of_unlike_numbers_of_targets_are_a_mean_of_means(counts):
    """The inverse weights add up to the number of shares, and to nothing else once one weight is another."""
    weights = [sum(counts) / len(counts) / n for n in counts]
    verdict = said(*weights)
    assert verdict.cause == "mean_of_means", verdict
    whose = "each rank" if counts[0] == counts[2] and counts[3] == counts[5] else "each share"
    assert whose in verdict.explanation
    assert said(*weights[:-1], weights[-1] * 1.01).cause == "counted_twice"
