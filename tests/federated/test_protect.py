"""Clients of federated rounds: what one of them moves, what noise hides it, and sums that nobody sees into."""

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.federated.federations import federated, recipe_of, weights_after
from unisono.spec.errors import ConfigProblems, UsageError
from unisono_contrib.federated.protect import budget_of, most_asked, noise_of
from unisono_contrib.privacy.client import add_noise, clip_delta, sensitivity
from unisono_contrib.privacy.mechanism import SampledGaussian
from unisono_contrib.privacy.prv import prv_epsilon
from unisono_contrib.privacy.stream import key_of_seed

pytest.importorskip("cryptography", reason="the extra `federated` is not installed")
KEY = key_of_seed(7)


def drawn(n: int, d: int = 300) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("bound", [1e-3, 0.5, 1e3, math.inf])
def test_a_clipped_delta_is_within_its_bound_and_points_the_same_way(bound: float) -> None:
    (delta,) = drawn(1)
    clipped = clip_delta(delta, bound)
    assert float(clipped.norm()) <= bound * (1 + 1e-12)
    assert torch.allclose(clipped * float(delta.norm()), delta * float(clipped.norm()))
    assert torch.equal(clip_delta(delta, float(delta.norm()) * 1.01), delta)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_delta_that_has_no_norm_counts_for_nothing(wrong: float) -> None:
    delta = torch.tensor([1.0, wrong])
    assert torch.equal(clip_delta(delta, 1.0), torch.zeros(2))
    assert torch.equal(clip_delta(torch.zeros(2), 1.0), torch.zeros(2))


@pytest.mark.parametrize("weights", [[1.0, 1.0], [10.0, 990.0], [3.0, 5.0, 1.0, 80.0], [1.0]])
def test_no_client_moves_the_mean_by_more_than_the_sensitivity(weights: list[float]) -> None:
    """And the one with the largest share does move it by as much, which bound / n would not hide."""
    deltas = torch.stack([clip_delta(delta, 0.5) for delta in 100.0 * drawn(len(weights))])
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    moved = [float((shares[i] * deltas[i]).norm()) for i in range(len(weights))]
    assert max(moved) == pytest.approx(sensitivity(0.5, shares.tolist()), rel=1e-12)


@pytest.mark.parametrize("shares", [[], [0.5, -0.1], [2.0]])
def test_shares_that_are_none_are_refused(shares: list[float]) -> None:
    with pytest.raises(UsageError, match="the sensitivity of a mean"):
        sensitivity(1.0, shares)


def test_the_noise_of_a_round_follows_the_largest_share() -> None:
    delta = torch.zeros(40_000, dtype=torch.float64)
    for shares in ([0.5, 0.5], [0.01, 0.99]):
        out = noise_of(2.0, 0.5, KEY)(delta, torch.tensor(shares), 3)
        assert float(out.std()) == pytest.approx(2.0 * 0.5 * max(shares), rel=0.02)


def test_noise_is_a_function_of_key_and_round() -> None:
    """Of no generator that others share, and of no call before it."""
    delta = torch.zeros(500, dtype=torch.float64)
    first = add_noise(delta, 1.0, KEY, 4)
    torch.manual_seed(0)
    assert torch.equal(first, add_noise(delta, 1.0, KEY, 4))
    for key, number in ((KEY, 5), (key_of_seed(8), 4)):
        other = add_noise(delta, 1.0, key, number)
        assert abs(float(torch.corrcoef(torch.stack((first, other)))[0, 1])) < 0.2
    assert float(delta.abs().max()) == 0.0


def test_without_bound_and_noise_rounds_are_plain() -> None:
    plain = weights_after(2)
    assert torch.equal(plain, weights_after(2, privacy__noise=0.0, privacy__clip="inf"))
    assert not torch.equal(plain, weights_after(2, privacy__noise=0.0, privacy__clip=0.01))


def test_a_round_says_its_epsilon_of_the_client_that_was_asked_most() -> None:
    federation = federated(privacy__noise=2.0, privacy__clip=0.1)
    lines = [federation.play_round() for _ in range(4)]
    config = federation.cohorts._drawn
    asked = Counter(client for number in range(4) for client in config.cohort(number))
    assert most_asked(config, 4)[-1] == max(asked.values()) < 4
    expected = prv_epsilon([SampledGaussian(2.0, 1.0, max(asked.values()))], 1e-5)
    assert lines[-1]["epsilon"] == pytest.approx(expected)
    assert [line["epsilon"] for line in lines] == sorted(line["epsilon"] for line in lines)


def test_the_noise_follows_from_a_target() -> None:
    federation = federated(privacy__target_epsilon=5.0, privacy__clip=0.1, privacy__accountant="rdp")
    recipe = federation.resolved.recipe
    budget = budget_of(recipe.privacy, federation.cohorts._drawn, 4)
    assert 4.9 < budget.epsilon(4) <= 5.0


def test_a_client_that_does_not_bound_its_delta_is_bounded_by_the_server() -> None:
    combiner = federated(privacy__noise=0.0, privacy__clip=0.1).combiner
    out = combiner(100.0 * drawn(3), torch.ones(3, dtype=torch.float64), 0)
    assert float(out.norm()) <= 0.1


# Secure sums -----------------------------------------------------------------------------------------------


def test_rounds_with_a_secure_sum_are_plain_but_for_its_steps() -> None:
    plain, hidden = weights_after(3), weights_after(3, federated__secure="true", federated__secure_bits=44)
    assert torch.allclose(plain, hidden, rtol=0.0, atol=1e-11) and not torch.equal(plain, hidden)
    assert torch.equal(hidden, weights_after(3, federated__secure="true", federated__secure_bits=44))


def test_a_delta_beyond_the_limit_is_refused_by_client_and_parameter() -> None:
    """The round is lost, and says so; nothing was clipped to fit."""
    federation = federated(federated__secure="true", federated__secure_limit=1e-6)
    before = federation.weights.clone()
    skipped = federation.play_round()["skipped"]
    assert re.search(r"client \d+: .*(weight|bias) is beyond the limit 1e-06", skipped)
    assert torch.equal(before, federation.weights)


def test_head_room_is_checked_before_the_first_round() -> None:
    with pytest.raises(UsageError, match="may wrap"):
        federated(federated__secure="true", federated__secure_limit=1e9)


def test_a_single_client_is_no_sum() -> None:
    with pytest.raises(UsageError, match="secure aggregation of 1 clients"):
        federated(federated__secure="true", federated__participation=0.05)


@pytest.mark.parametrize("protection", [{"federated__secure": "true"}, {"privacy__noise": 1.0}])
@pytest.mark.parametrize(
    "keys",
    [{"federated__aggregate": "median"}, {"federated__strategy": "scaffold"}, {"federated__strategy": "fedbuff"},
     {"federated__codec": "int8"}],
)  # fmt: skip
def test_what_would_show_more_is_refused(protection: dict[str, Any], keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigProblems) as caught:
        recipe_of(**protection, **keys)
    assert [problem.code for problem in caught.value.problems] == ["P42"]


def test_clients_of_a_secure_sum_bound_what_they_send() -> None:
    """The server, which sees no delta, cannot."""
    keys = {"federated__secure": "true", "privacy__noise": 0.0}
    assert federated(**keys, privacy__clip=1e9).play_round()["delta_norm"] > 1e-2
    assert 0.0 < federated(**keys, privacy__clip=1e-3).play_round()["delta_norm"] <= 1e-3
