"""slowmo: rounds with a slow momentum in units of the learning rate."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sync.outer import distance, flat, gradients_of, mean, play, recipe_of
from unisono_contrib.sync._rounds import Timing
from unisono_contrib.sync._slowmo import mean_rate

pytestmark = pytest.mark.timeout(120)

STEPS = 7


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


def oracle(recipe, h: int, alpha: float, beta: float) -> dict[str, Tensor]:
    """SlowMo with plain SGD inside on two replicas, as the paper writes it, with a round's mean learning rate."""
    gradients = gradients_of(recipe, 2)
    slow = dict(gradients.start)
    momentum = {name: torch.zeros_like(x) for name, x in slow.items()}
    own, rates = [dict(slow) for _ in range(2)], []
    for step in range(recipe.train.steps):
        rates.append(recipe.train.rate()(step))
        for replica, weights in enumerate(own):
            for name, grad in gradients(step, replica, weights).items():
                weights[name] = weights[name] - rates[-1] * grad
        if (step + 1) % h == 0 or step + 1 == recipe.train.steps:
            merged, rate = mean(own), sum(rates) / len(rates)
            for name, x in slow.items():
                momentum[name] = beta * momentum[name] + (x - merged[name]) / rate
                slow[name] = x - alpha * rate * momentum[name]
            own, rates = [dict(slow) for _ in range(2)], []
    return slow


@pytest.mark.parametrize(
    "schedule", [{"lr_schedule": "constant"}, {"lr_schedule": "cosine", "warmup_steps": 2}]
)
@pytest.mark.parametrize(("h", "alpha", "beta"), [(2, 1.0, 0.7), (3, 0.5, 0.6)])
def test_weights_are_those_of_the_algorithm_written_out(source, schedule, h, alpha, beta) -> None:
    recipe = recipe_of(source, STEPS, **schedule)
    wanted = flat(oracle(recipe, h, alpha, beta))
    for got in play(recipe, f"dp=2 sync=slowmo:h={h},slow_lr={alpha},slow_momentum={beta}"):
        assert distance(got.last, wanted) < 1e-12
        assert torch.equal(flat(got.center), got.last)


def test_without_momentum_and_in_full_steps_it_is_local_sgd_with_any_optimiser(source) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw", clip=0.5)
    slow, local = (
        play(recipe, f"dp=2 sync={sync}") for sync in ("slowmo:h=3,slow_lr=1,slow_momentum=0", "local_sgd:3")
    )
    for a, b in zip(slow, local, strict=True):
        assert distance(a.last, b.last) < 1e-12


def test_a_last_round_at_a_learning_rate_of_zero_moves_nothing(source) -> None:
    recipe = recipe_of(source, STEPS, lr_schedule="cosine", min_lr=0.0)  # the last round is one step long
    for got in play(recipe, "dp=2 sync=slowmo:h=6"):
        assert torch.equal(got.last, flat(got.weights[-2])) and bool(got.last.isfinite().all())


@pytest.mark.parametrize("at", [3, 4])
def test_a_run_that_was_saved_goes_on_as_if_it_was_not(source, tmp_path, at: int) -> None:
    recipe, plan = recipe_of(source, STEPS, optimizer="adamw"), "dp=2 sync=slowmo:h=3,slow_momentum=0.6"
    whole = play(recipe, plan, save_at=at, folder=tmp_path / "run")
    again = play(recipe, plan, begin=next((tmp_path / "run" / "checkpoints").iterdir()))
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(a.last, b.last)
    assert any(key.endswith("/outer_momentum") for key in whole[0].state)


def test_the_first_steps_may_be_lock_step(source) -> None:
    recipe = recipe_of(source, STEPS, optimizer="adamw")
    plain, slow = (play(recipe, f"dp=2 sync={sync}")[0] for sync in ("every_step", "slowmo:h=2,warmup=4"))
    assert distance(flat(slow.weights[3]), flat(plain.weights[3])) < 1e-12


def test_a_round_s_rate_is_the_mean_over_its_steps() -> None:
    timing = Timing(h=3, warmup=2)
    assert [mean_rate(float, timing, step) for step in (4, 7, 8, 9)] == [3.0, 6.0, 8.0, 8.5]
