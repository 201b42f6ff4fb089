"""LARS, LAMB and LANS against the formulas of their papers, and over ranks that hold parts of matrices."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.train.small import recipe, started
from unisono.config import TrainConfig, resolve
from unisono.parallel.params import Slot
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.training import OPTIMISERS, Optimiser, UpdateSizes
from unisono.train.step.train_step import train_step
from unisono.train.step.update import make, state_of
from unisono_contrib.train.optim._trust_laws import scaled_within, trust_ratio
from unisono_contrib.train.optim.lamb import Lamb
from unisono_contrib.train.optim.lans import Lans
from unisono_contrib.train.optim.lars import Lars

DECAY, ADAM = 0.2, {"betas": (0.7, 0.9), "eps": 1e-3}
MEMBERS = [Lars(momentum=0.8, trust_coefficient=0.02), Lamb(**ADAM), Lans(**ADAM)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lars(w, g, kept, lr):
    """Algorithm 1 of You et al. 2017, with the learning rate outside of the velocity, as torch's SGD has it."""
    ratio = 0.02 * w.norm() / (g.norm() + DECAY * w.norm()) if w.norm() else 1.0
    kept["v"] = 0.8 * kept.get("v", 0.0) + ratio * (g + DECAY * w)
    return w - lr * kept["v"]


def moments(g, kept):
    kept["t"] = t = kept.get("t", 0) + 1
    kept["m"] = 0.7 * kept.get("m", 0.0) + 0.3 * g
    kept["v"] = 0.9 * kept.get("v", 0.0) + 0.1 * g * g
    return kept["m"] / (1 - 0.7**t), (kept["v"] / (1 - 0.9**t)).sqrt() + 1e-3


def lamb(w, g, kept, lr):
    """Algorithm 2 of You et al. 2020."""
    m, below = moments(g, kept)
    step = m / below + DECAY * w
    return w - lr * (w.norm() / step.norm() if w.norm() else 1.0) * step


def lans(w, g, kept, lr):
    """Algorithm 2 of Zheng et al. 2020."""
    g = g / g.norm()
    m, below = moments(g, kept)
    along = [m / below + DECAY * w, g / below + DECAY * w]
    ratios = [w.norm() / x.norm() if w.norm() else 1.0 for x in along]
    return w - lr * (0.7 * ratios[0] * along[0] + 0.3 * ratios[1] * along[1])


@pytest.mark.parametrize(("member", "formula"), list(zip(MEMBERS, (lars, lamb, lans), strict=True)))
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_steps_are_those_of_the_papers(member: Optimiser, formula, scale: float) -> None:
    """Of the rate that the groups say at the time, which no step changes; from zero too."""
    weight, kept = nn.Parameter(scale * randn(4, 3)), {}
    live, want = (
        member.bind([{"params": [weight], "weight_decay": DECAY}], 1.0, False),
        weight.detach().clone(),
    )
    for step in range(5):
        rate = live.param_groups[0]["lr"] = 0.05 * (step + 1)
        weight.grad = randn(4, 3, seed=step + 1)
        live.step()
        want = formula(want, weight.grad, kept, rate)
        torch.testing.assert_close(weight.detach(), want, rtol=1e-10, atol=1e-12)
        assert live.param_groups[0]["lr"] == rate
    assert bool(weight.any())


@pytest.mark.parametrize("member", MEMBERS[:2])
def test_with_a_ratio_of_one_a_step_is_that_of_the_plain_optimiser(member: Optimiser) -> None:
    off = member.model_copy(update={"trust_clip": (1.0, 1.0)})
    weights = [nn.Parameter(randn(4, 3)) for _ in range(2)]
    lives = [
        m.bind([{"params": [w], "weight_decay": DECAY}], 0.05, False)
        for m, w in zip((off, member.plain()), weights, strict=True)
    ]
    for step in range(5):
        for live, weight in zip(lives, weights, strict=True):
            weight.grad = randn(4, 3, seed=step + 1)
            live.step()
        torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-14)


def test_a_lamb_step_is_as_long_as_its_weights_times_the_rate_however_large_the_gradient() -> None:
    for member in MEMBERS[1:]:
        for size in (1e-6, 1.0, 1e6):
            weight = nn.Parameter(randn(6, 4))
            live = member.bind([{"params": [weight], "weight_decay": 0.0}], 0.01, False)
            before, weight.grad = weight.detach().clone(), size * randn(6, 4, seed=1)
            live.step()
            assert float((weight.detach() - before).norm() / before.norm()) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize("member", MEMBERS)
def test_laws_hold_float32_steps(member: Optimiser) -> None:
    weight = nn.Parameter(randn(32, 8, dtype=torch.float32))
    live = member.bind([{"params": [weight], "weight_decay": 0.1}], 0.05, False)
    live.state[weight] = member.state(weight)
    for step in range(4):
        before = weight.detach().double()
        held = {key: value.double().clone() for key, value in live.state[weight].items()}
        weight.grad = randn(32, 8, seed=step + 1, dtype=torch.float32)
        live.step()
        law = member.law(
            UpdateSizes(0.05, 0.1, step, 16 * 2.0**-24), before, held, weight.grad.double(),
            torch.zeros(32, 8, dtype=torch.float64),
        )  # fmt: skip
        assert law.keys() == {"param", *held}
        for key, (value, error) in law.items():
            seen = weight if key == "param" else live.state[weight][key]
            assert bool(((seen.double() - value).abs() <= error).all()), key
            assert key == "step" or float(error.max()) < 1e-3 * float(value.abs().max())


@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.3, 3.0])
@pytest.mark.parametrize("clip", [None, (0.5, 2.0)])
def test_an_error_moves_a_scaled_step_no_further_than_its_bound(size: float, clip) -> None:
    for seed in range(20):
        x, error = randn(5, 4), size * randn(5, 4, seed=seed + 1)
        value, bound = scaled_within(x + error, error.abs(), 2.0, clip, 2.0**-48)
        right = trust_ratio(2.0, float(x.norm()), clip) * x
        assert bool(((right - value).abs() <= bound).all())
