"""Steps of different numbers of leaves: what one device computes with the same batches, on any ranks, also resumed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.small import recipe, started
from unisono.config import Recipe, resolve
from unisono.spec.errors import ConfigProblems
from unisono.train.state.run_state import pieces_of
from unisono.train.step.train_step import fetch, next_step, train_step
from unisono_contrib.config.sections.privacy import PrivacyConfig
from unisono_contrib.config.sections.ramp import RampConfig

ALONE: Any = SimpleNamespace(rank=0, world=1, local_rank=0, backend="gloo")
RAMP = {"first": 2, "growth": 2, "steps": 3}


def ramping(folder: Path, keys: dict[str, Any] = RAMP, **train: Any) -> Recipe:
    train = {"global_batch": 8, "micro_batch": 1, "steps": 8, **train}
    return recipe(folder, **train).model_copy(update={"ramp": RampConfig(**keys)})


def weights_after(ctx: Any, folder: str, plan: str) -> dict[str, Tensor]:
    run, feed, _ = started(ctx, ramping(Path(folder)), plan)
    for _ in range(5):
        next_step(run, feed)
    return {slot.name: slot.master.detach().clone() for slot in run.local.slots}


def test_a_step_is_the_mean_over_the_leaves_of_its_batch(tmp_path: Path) -> None:
    """The loss of a plain step from the same weights, of the same samples, with global_batch = 2, 4, 6, 8, 8."""
    run, feed, _ = started(ALONE, ramping(tmp_path), "dp=1 micros=8")
    sizes = []
    for _ in range(5):
        leaves = fetch(run, feed)
        sizes.append(len(leaves))
        kept = {slot.name: slot.master.detach().clone() for slot in run.local.slots}
        report = train_step(run, leaves)
        plain = recipe(tmp_path, global_batch=len(leaves), micro_batch=1, steps=8)
        other, _, _ = started(ALONE, plain, f"micros={len(leaves)}")
        with torch.no_grad():
            for slot in other.local.slots:
                slot.master.copy_(kept[slot.name])
        same = train_step(other, leaves)
        assert (report.loss, report.norm) == pytest.approx((same.loss, same.norm), rel=1e-12)
    assert sizes == [2, 4, 6, 8, 8]


@pytest.mark.parametrize("plan", ["dp=2", "shard=2"])
def test_ranks_change_nothing(threads: Any, tmp_path: Path, plan: str) -> None:
    (alone,) = threads(weights_after, 1, group=False, folder=str(tmp_path), plan="dp=1")
    for end in threads(weights_after, 2, folder=str(tmp_path), plan=plan):
        for name, x in end.items():
            if x.shape == alone[name].shape:
                assert torch.allclose(x, alone[name], rtol=1e-10, atol=1e-12), name


def test_a_run_that_goes_on_in_the_middle_has_the_same_bits(tmp_path: Path) -> None:
    whole, feed, _ = started(ALONE, ramping(tmp_path), "dp=1 micros=8")
    for _ in range(2):
        next_step(whole, feed)
    later, again, _ = started(ALONE, ramping(tmp_path), "dp=1 micros=8")
    with torch.no_grad():
        for ours, theirs in zip(pieces_of(later), pieces_of(whole), strict=True):
            ours.tensor.copy_(theirs.tensor)
    later.step = whole.step
    for _ in range(3):
        assert next_step(later, again).loss == next_step(whole, feed).loss


def test_a_validation_is_of_whole_batches_and_the_next_step_is_not(tmp_path: Path) -> None:
    run, feed, validation = started(ALONE, ramping(tmp_path), "dp=1 micros=8")
    next_step(run, feed)
    assert len(fetch(run, validation, 0)) == 8
    assert len(fetch(run, feed)) == 4


@pytest.mark.parametrize(
    ("code", "keys", "plan", "train"),
    [
        ("P43", RAMP, "dp=2 sync=period:steps=2", {}),
        ("P43", RAMP, "dp=2 sync=every_step:balance=10", {}),
        ("P43", RAMP, "dp=2 sync=diloco:h=2", {}),
        ("P43", RAMP, "pp=2 schedule=pipedream", {"clip": 0.0}),
        ("C06", {"first": 3, "growth": 2}, "dp=1", {}),
        ("C06", {"first": 8}, "dp=1", {}),
        ("C06", {"first": 2}, "dp=4", {}),
        ("C06", {"first": 1}, "dp=1", {"micro_batch": 2}),
        ("P18", {"first": 2, "growth": 2}, "dp=2 sync=canonical", {}),
    ],
)
def test_what_cannot_be_played_is_refused(
    tmp_path: Path, code: str, keys: dict[str, Any], plan: str, train: dict[str, Any]
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        resolve(ramping(tmp_path, keys, **train), plan)
    assert code in {problem.code for problem in caught.value.problems}


def test_it_is_refused_beside_batches_of_random_size(tmp_path: Path) -> None:
    both = ramping(tmp_path).model_copy(update={"privacy": PrivacyConfig(noise=1.0)})
    with pytest.raises(ConfigProblems, match="random size"):
        resolve(both, "dp=1")
