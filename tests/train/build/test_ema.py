"""The average of the weights: the same on every plan, in checkpoints, over a resume, and in place of the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.small import recipe
from tests.train.test_session import play
from unisono.config import Recipe, resolve, resolved_toml
from unisono.parallel.params import Slot
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.sync import Verdict
from unisono.train.export import checkpoint_of
from unisono.train.export.stored import StoredWeights
from unisono.train.state.checkpoint import read_full
from unisono_contrib.config.sections.ema import EmaConfig
from unisono_contrib.train.build.ema import WeightAverages
from unisono_contrib.train.evaluation import evaluate_one

STEPS = 4


def averaging(folder: Path, decay: float = 0.75, warmup: bool = False, **train: Any) -> Recipe:
    """Saves after each step."""
    told = recipe(folder, **{"steps": STEPS, "save_every": 1, "keep": 9, **train})
    return told.model_copy(update={"ema": EmaConfig(decay=decay, warmup=warmup)})


def at(run: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with `kind`/, without it."""
    whole = read_full(run / "checkpoints" / f"step-{step:06d}")
    return {name.partition("/")[2]: x for name, x in whole.items() if name.startswith(f"{kind}/")}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("warmup", [False, True])
def test_it_follows_the_weights_from_where_they_began(tmp_path: Path, warmup: bool) -> None:
    """By the textbook's formula, from the weights of each checkpoint; lr = 0 leaves them as they began."""
    told, run = averaging(tmp_path, warmup=warmup), tmp_path / "run"
    play(told, "dp=1", 1, run)
    play(averaging(tmp_path, lr=0.0, steps=1), "dp=1", 1, tmp_path / "still")
    want = at(tmp_path / "still", 1, "model")
    for step in range(1, STEPS + 1):
        decay = min(0.75, (1 + step) / (10 + step)) if warmup else 0.75
        weights, got = at(run, step, "model"), at(run, step, "ema")
        want = {name: decay * want[name] + (1 - decay) * weights[name] for name in want}
        assert got.keys() == want.keys() == weights.keys()
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], rtol=1e-12, atol=1e-14)
        assert any(not torch.equal(x, weights[name]) for name, x in got.items())


def test_it_follows_updates_that_were_applied_alone() -> None:
    weights = nn.Linear(2, 3, bias=False).weight
    slot = Slot("w", weights, weights, (3, 2), (0, 0))
    averages = WeightAverages(EmaConfig(decay=0.5), {"w": torch.zeros(3, 2)}, torch.zeros(()))
    averages.slots.append((averages.by_name["w"], slot))
    averages.follow(Verdict.DISCARD)
    assert not averages.by_name["w"].any() and not averages.updates
    averages.follow(Verdict.APPLY)
    assert torch.equal(averages.by_name["w"], weights.detach() / 2) and averages.updates == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plan", "ranks", "bits"),
    [
        ("dp=2 sync=canonical", 2, True),
        ("shard=2 sync=canonical", 2, True),
        ("pp=2 sync=canonical", 2, True),
        ("tp=2", 2, False),
    ],
)
def test_it_is_that_of_one_device_and_goes_on_under_another_plan(
    tmp_path: Path, plan: str, ranks: int, bits: bool
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    alone = "dp=1 sync=canonical" if bits else "dp=1"
    told = averaging(tmp_path, warmup=True, steps=3)
    play(told, alone, 1, one)
    play(told, plan, ranks, many, stop=1)
    play(told, alone, 1, many, resume=True)
    for kind in ("model", "ema"):
        want, got = at(one, 3, kind), at(many, 3, kind)
        assert want.keys() == got.keys()
        for name, x in got.items():
            if bits:
                assert torch.equal(x, want[name]), name
            torch.testing.assert_close(x, want[name], rtol=1e-9, atol=1e-12)


@pytest.mark.timeout(60)
def test_it_stands_in_for_the_weights(tmp_path: Path) -> None:
    """In validations of the run, after which the weights are as they were; in `evaluate` and `export`."""
    keys: dict[str, Any] = {"eval_every": 2, "eval_batches": 1, "steps": 2}
    told, run, other = averaging(tmp_path, **keys), tmp_path / "run", tmp_path / "other"
    (plain,) = play(told, "dp=1", 1, run)
    of_average = told.model_copy(update={"ema": EmaConfig(decay=0.75, validates=True)})
    averaged, _ = play(of_average, "shard=2", 2, other)
    for name, x in at(run, 2, "model").items():
        torch.testing.assert_close(at(other, 2, "model")[name], x, rtol=1e-9, atol=1e-12)
    (run / "config.resolved.toml").write_text(resolved_toml(resolve(told, "dp=1")))
    assert evaluate_one(run)["val_loss"] == plain["val_loss"]
    assert evaluate_one(run, weights="ema")["val_loss"] == pytest.approx(averaged["val_loss"], rel=1e-9)
    assert abs(averaged["val_loss"] - plain["val_loss"]) > 1e-4
    given = StoredWeights(checkpoint_of(run, weights="ema"), averaged=True)
    for name, x in at(run, 2, "ema").items():
        assert torch.equal(given[name], x)


def test_a_run_without_it_has_none(tmp_path: Path) -> None:
    play(recipe(tmp_path, steps=1), "dp=1", 1, tmp_path / "run")
    with pytest.raises(UsageError, match="no average") as caught:
        checkpoint_of(tmp_path / "run", weights="ema")
    assert caught.value.code == "F03"


@pytest.mark.timeout(60)
def test_it_begins_at_the_weights_of_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    play(recipe(tmp_path, steps=2), "dp=1", 1, run)
    begun = at(run, 2, "model")
    play(averaging(tmp_path, steps=3), "dp=1", 1, run, resume=True)
    for name, x in at(run, 3, "ema").items():
        torch.testing.assert_close(x, 0.75 * begun[name] + 0.25 * at(run, 3, "model")[name])


@pytest.mark.parametrize("plan", ["dp=2 sync=local_sgd", "pp=2 schedule=pipedream"])
def test_plans_without_one_set_of_weights_are_refused(tmp_path: Path, plan: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        resolve(averaging(tmp_path), plan)
    assert "P45" in {problem.code for problem in caught.value.problems}
