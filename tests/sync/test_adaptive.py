"""adaptive: rounds that get shorter as the loss falls, the same ones on all replicas."""

import math
from pathlib import Path

import pytest
import torch

from tests.sync.outer import distance, flat, gradients_of, mean, play, recipe_of
from unisono_contrib.sync._adaptive import shorter

pytestmark = pytest.mark.timeout(120)

STEPS, SYNC, H, EVERY, GAMMA = 48, "dp=2 sync=adaptive:h=12,every=12,gamma=0.8", 12, 12, 0.8


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


def meetings(losses: list[float]) -> list[int]:
    """The steps in which replicas meet, from the losses of those steps: the paper's rule, written out."""
    met, period, first, since, chosen = [], H, None, [], 0
    at = H - 1
    while at < STEPS - 1:
        met.append(at)
        first = first or losses[at]
        since.append(losses[at])
        if (at + 1) // EVERY > chosen:
            chosen = (at + 1) // EVERY
            wanted = math.ceil(H * math.sqrt(sum(since) / len(since) / first))
            period = wanted if wanted < period else math.ceil(GAMMA * period)
            since = []
        at += period
    return [*met, STEPS - 1]


def test_replicas_meet_when_the_papers_rule_says(source) -> None:
    recipe = recipe_of(source, STEPS, lr=0.5)
    one, other = play(recipe, SYNC)
    met = [step for step, sent in enumerate(one.sent) if sent]
    assert met == meetings([report.loss for report in one.reports])
    assert met == [step for step, sent in enumerate(other.sent) if sent]
    assert torch.equal(one.state["adaptive"], other.state["adaptive"])
    chosen = [line["period"] for line in one.metrics if "period" in line]
    assert len(chosen) > 1 and chosen == sorted(chosen, reverse=True) and chosen[-1] < H


def test_weights_are_means_at_those_meetings(source) -> None:
    recipe = recipe_of(source, STEPS, lr=0.5)
    got = play(recipe, SYNC)
    gradients = gradients_of(recipe, 2)
    own = [dict(gradients.start) for _ in range(2)]
    for step in range(STEPS):
        for replica, weights in enumerate(own):
            for name, grad in gradients(step, replica, weights).items():
                weights[name] = weights[name] - recipe.train.rate()(step) * grad
        if got[0].sent[step]:
            own = [dict(mean(own)) for _ in range(2)]
    assert distance(got[1].last, flat(own[1])) < 1e-12


@pytest.mark.parametrize("at", [15, 30])
def test_a_run_that_was_saved_meets_when_it_would_have(source, tmp_path, at) -> None:
    recipe = recipe_of(source, STEPS, lr=0.5)
    whole = play(recipe, SYNC, save_at=at, folder=tmp_path / "run")
    again = play(recipe, SYNC, begin=next((tmp_path / "run" / "checkpoints").iterdir()))
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(a.last, b.last)
        assert a.sent[at:] == b.sent


def test_a_quarter_of_the_loss_halves_a_round() -> None:
    assert shorter(16, 16, loss=1.0, first=4.0, gamma=0.5) == 8
    assert shorter(8, 16, loss=1.0, first=4.0, gamma=0.5) == 4  # no shorter by the loss
    assert shorter(1, 16, loss=1.0, first=4.0, gamma=0.5) == 1
