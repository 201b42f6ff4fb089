"""Robust aggregates: identities with the mean, oracles, and attackers that are never chosen."""

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.spec.errors import UsageError
from unisono_contrib.federated.aggregates._robust import krum_scores, squared_distances
from unisono_contrib.spec.federated import AGGREGATES

ROBUST = [
    "median",
    "trimmed_mean:share=0.3",
    "krum:attackers=2",
    "multi_krum:attackers=2",
    "bulyan:attackers=2",
]


def drawn(n: int, d: int, seed: int = 0, rms: float = 1.0) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * rms


def weights(n: int) -> Tensor:
    return torch.arange(1.0, n + 1.0, dtype=torch.float64)


def combined(text: str, deltas: Tensor, by: Tensor | None = None) -> Tensor:
    return AGGREGATES.read(text).combine(deltas, weights(len(deltas)) if by is None else by)


@pytest.mark.parametrize(
    "text", ["trimmed_mean:share=0", "multi_krum:attackers=0", "multi_krum:attackers=0,keep=9"]
)
def test_what_leaves_nobody_out_is_the_mean(text: str) -> None:
    deltas = drawn(9, 40)
    assert torch.equal(combined(text, deltas), combined("mean", deltas))


def test_bulyan_without_attackers_is_the_mean() -> None:
    deltas = drawn(9, 40)
    assert torch.allclose(
        combined("bulyan:attackers=0", deltas), combined("mean", deltas), atol=1e-15, rtol=1e-13
    )


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_median_is_numpys(n: int) -> None:
    deltas = drawn(n, 30, seed=n)
    assert np.array_equal(combined("median", deltas).numpy(), np.median(deltas.numpy(), axis=0))


@pytest.mark.parametrize("share, out", [(0.1, 3), (0.2, 6), (0.33, 9)])
def test_the_trimmed_mean_leaves_as_many_out_as_it_says(share: float, out: int) -> None:
    deltas = drawn(30, 20)
    expected = np.sort(deltas.numpy(), axis=0)[out : 30 - out].mean(0)
    assert np.allclose(combined(f"trimmed_mean:{share}", deltas, torch.ones(30).double()).numpy(), expected)


def test_the_trimmed_mean_weighs_what_it_keeps() -> None:
    deltas = torch.tensor([[0.0], [1.0], [2.0], [9.0]], dtype=torch.float64)
    by = torch.tensor([5.0, 1.0, 3.0, 7.0], dtype=torch.float64)
    assert combined("trimmed_mean:0.25", deltas, by).item() == pytest.approx((1.0 + 6.0) / 4.0)


def naive_krum(deltas: Tensor, attackers: int) -> int:
    rows, scores = deltas.numpy(), []
    for i, row in enumerate(rows):
        others = sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)
        scores.append(sum(others[: len(rows) - attackers - 2]))
    return int(np.argmin(scores))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n, attackers", [(7, 2), (11, 1), (3, 0)])
def test_krum_chooses_as_its_definition_says(n: int, attackers: int, seed: int) -> None:
    deltas = drawn(n, 12, seed)
    assert torch.equal(combined(f"krum:{attackers}", deltas), deltas[naive_krum(deltas, attackers)])


@pytest.mark.parametrize("rms", [1e-6, 3e-5, 1e-3, 1.0])
def test_no_attacker_is_ever_chosen(rms: float) -> None:
    """50 tries at each size, 8 honest clients and 2 attackers that send a shifted update of the same size. The deltas
    have a common part, as those of weights 100,000 times as large once had."""
    d, attackers = 2_000, 2
    for seed in range(50):
        deltas = 1.0 + drawn(10, d, seed, rms)
        deltas[8:] += 3.0 * rms * drawn(1, d, seed + 1000).sign()
        places = [i for i in range(10) if torch.equal(combined(f"krum:{attackers}", deltas), deltas[i])]
        assert places and places[0] < 8


def test_distances_do_not_cancel() -> None:
    deltas = 1e3 + drawn(6, 500, rms=1e-6)
    exact = (deltas[:, None] - deltas[None]).square().sum(-1)
    assert torch.allclose(squared_distances(deltas), exact, rtol=1e-12, atol=0.0)
    assert bool((squared_distances(deltas) >= 0.0).all())


@pytest.mark.parametrize("text", ROBUST)
@pytest.mark.parametrize("evil", [1e3, 1e200, float("inf"), float("nan"), -float("inf")])
def test_attackers_move_nothing_beyond_what_honest_clients_send(text: str, evil: float) -> None:
    """However large their weights are."""
    honest = drawn(9, 25, rms=0.1)
    deltas = torch.cat((honest, torch.full((2, 25), evil, dtype=torch.float64)))
    by = torch.ones(11, dtype=torch.float64)
    by[9:] = 1e9
    out = combined(text, deltas, by)
    assert bool((out <= honest.max(0).values + 1e-12).all() and (out >= honest.min(0).values - 1e-12).all())


def test_bulyan_sees_an_attack_on_one_coordinate() -> None:
    """The distances of 2,000 coordinates hide it, and Krum's own choice may have it."""
    deltas = drawn(11, 2_000)
    deltas[:2] *= 0.9  # nearer to all others than these are to each other
    deltas[:2, 7] = 20.0
    assert (
        abs(combined("bulyan:attackers=2", deltas)[7].item())
        < 3.0
        < abs(combined("krum:2", deltas)[7].item())
    )


@pytest.mark.parametrize("text", ROBUST)
def test_the_order_of_clients_does_not_matter(text: str) -> None:
    deltas, order = drawn(11, 17), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    once, again = combined(text, deltas), combined(text, deltas[order], weights(11)[order])
    assert torch.allclose(once, again, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("text", ROBUST)
def test_what_is_combined_is_not_changed(text: str) -> None:
    deltas = drawn(11, 17)
    before = deltas.clone()
    combined(text, deltas).add_(1.0)
    assert torch.equal(deltas, before)


@pytest.mark.parametrize(
    "text, enough", [("krum:2", 7), ("multi_krum:2", 7), ("bulyan:2", 11), ("krum:0", 3), ("bulyan:1", 7)]
)
def test_too_few_clients_are_refused_by_both_numbers(text: str, enough: int) -> None:
    combined(text, drawn(enough, 3))
    with pytest.raises(UsageError, match=rf"= {enough} clients in a round, and there are {enough - 1}"):
        combined(text, drawn(enough - 1, 3))


def test_keeping_more_than_the_honest_ones_is_refused() -> None:
    with pytest.raises(UsageError, match="keeps 9 of 10 clients, and attackers=2"):
        combined("multi_krum:attackers=2,keep=9", drawn(10, 3))


def test_scores_take_the_nearest_neighbours() -> None:
    distances = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 9.0], [4.0, 9.0, 0.0]], dtype=torch.float64)
    for attackers in (0, 1):  # one neighbour at least
        assert krum_scores(distances, attackers).tolist() == [1.0, 1.0, 4.0]
