"""DP-SGD: without bound and noise it is plain training, and with them one device's, whoever computes what."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.small import recipe, started
from unisono.config import ModelConfig, Recipe, resolve
from unisono.models.noise import Noise
from unisono.parallel.params import Slot
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.sync import Verdict
from unisono.train.data.load import load
from unisono.train.state.resume import check_fits
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step
from unisono_contrib.config.sections.privacy import PrivacyConfig
from unisono_contrib.privacy.mechanism import SampledGaussian
from unisono_contrib.privacy.prv import prv_epsilon
from unisono_contrib.privacy.rdp import rdp_epsilon
from unisono_contrib.privacy.stream import key_of_seed
from unisono_contrib.train.data.poisson import Poisson
from unisono_contrib.train.step.by_sample import clipping, squares_of, weighted_sum
from unisono_contrib.train.step.private import Budget, budget_of, made_private

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")

ALONE: Any = SimpleNamespace(rank=0, world=1, local_rank=0, backend="gloo")
OPEN = {"noise": 0.0, "clip": math.inf, "sampling": "shuffle"}
USUAL = {"noise": 1.0, "clip": 0.3}


def private(folder: Path, keys: dict[str, Any] | None, **train: Any) -> Recipe:
    train = {"optimizer": "sgd", "lr": 0.5, "clip": 0.0, **train}
    section = None if keys is None else PrivacyConfig(**keys)
    return recipe(folder, **train).model_copy(update={"privacy": section})


def weights_after(
    ctx: Any, folder: str, plan: str, keys: dict[str, Any] | None, steps: int = 3, **train: Any
) -> Any:
    run, feed, _ = started(ctx, private(Path(folder), keys, **train), plan)
    said = [train_step(run, feed.fetch(run.step, run.leaves)) for _ in range(steps)]
    return {
        "weights": {slot.name: slot.master.detach().clone() for slot in run.local.slots},
        "losses": [report.loss for report in said],
        "norms": [report.norm for report in said],
        "epsilons": [report.says.get("epsilon", "none") for report in said],
    }


def alike(a: Any, b: Any, rtol: float = 1e-11) -> None:
    for name, x in a["weights"].items():
        assert torch.allclose(x, b["weights"][name], rtol=rtol, atol=1e-13), name
    assert a["losses"] == pytest.approx(b["losses"], rel=1e-11)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("micro_batch", [2, 1])
def test_without_bound_and_noise_it_is_plain(threads: Any, tmp_path: Path, micro_batch: int) -> None:
    """Tied weights and dropout included; micro_batch = 1 computes by autograd, 2 by vmap."""
    argument = {"folder": str(tmp_path), "plan": "dp=1", "micro_batch": micro_batch}
    (plain,) = threads(weights_after, 1, group=False, keys=None, **argument)
    (ours,) = threads(weights_after, 1, group=False, keys=OPEN, **argument)
    alike(plain, ours)
    assert ours["epsilons"] == [None] * 3 and plain["epsilons"] == ["none"] * 3


@pytest.mark.timeout(90)
@pytest.mark.parametrize("keys", [USUAL, {**USUAL, "sampling": "shuffle"}])
def test_ranks_and_micro_batches_change_nothing(threads: Any, tmp_path: Path, keys: dict[str, Any]) -> None:
    """Noise drawn on each rank, for each micro-batch, or from a generator that ranks share would."""
    (alone,) = threads(weights_after, 1, group=False, folder=str(tmp_path), plan="dp=1", keys=keys)
    for plan in ("dp=2", "dp=4"):
        ends = threads(weights_after, int(plan[-1]), folder=str(tmp_path), plan=plan, keys=keys)
        for end in ends:
            alike(alone, end)
            assert all(torch.equal(x, ends[0]["weights"][name]) for name, x in end["weights"].items())
    torch.manual_seed(99)
    (smaller,) = threads(
        weights_after, 1, group=False, folder=str(tmp_path), plan="dp=1", keys=keys, micro_batch=1
    )
    alike(alone, smaller)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "plan, micro_batch", [("tp=2", 2), ("tp=2 pp=2", 2), ("shard=2 pp=2", 2), ("dp=2 shard=2 zero=1", 1)]
)
def test_no_cut_changes_anything(threads: Any, tmp_path: Path, plan: str, micro_batch: int) -> None:
    """Of gradients that are clipped by their whole norm, tied weights included, nor of noise, nor of Poisson batches
    whose leaves are larger and smaller than micro_batch, and empty in one step."""
    usual = {"folder": str(tmp_path), "keys": USUAL, "global_batch": 4, "micro_batch": micro_batch}
    usual["begin"] = empty_step(tmp_path, 4) - 1
    ((alone, losses, norms),) = threads(parts_after, 1, group=False, plan="dp=1", **usual)
    world = math.prod(int(size) for size in re.findall(r"(?:dp|pp|tp|shard)=(\d)", plan))
    for parts, *numbers in threads(parts_after, world, plan=plan, **usual):
        assert numbers[0] == pytest.approx(losses, rel=1e-11) and numbers[1] == pytest.approx(
            norms, rel=1e-11
        )
        for name, (start, part) in parts.items():
            box = tuple(slice(a, a + size) for a, size in zip(start, part.shape, strict=True))
            assert torch.allclose(part, alone[name][1][box], rtol=1e-11, atol=1e-13), name


def empty_step(folder: Path, batch: int) -> int:
    feed, _ = poisson(folder, batch, seed=3)
    return next(step for step in range(1, 2000) if not len(feed.chosen(step)))


def parts_after(
    ctx: Any, folder: str, plan: str, keys: dict[str, Any], begin: int, **train: Any
) -> tuple[dict[str, Any], list[float], list[float]]:
    """Of a rank that may hold a part of each weight: ({name: (where it begins, the part)}, losses, norms)."""
    run, feed, _ = started(ctx, private(Path(folder), keys, **train), plan)
    run.step = begin
    said = [train_step(run, feed.fetch(run.step, run.leaves)) for _ in range(3)]
    parts = {slot.name: (slot.start, slot.master.detach().clone()) for slot in run.local.slots}
    return parts, [report.loss for report in said], [report.norm for report in said]


def one_run(folder: Path, keys: dict[str, Any], **train: Any) -> tuple[Run, Any]:
    run, feed, _ = started(ALONE, private(folder, keys, **train), "dp=1")
    return run, feed


def gradients(run: Run, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
    run.player.play(run.row, leaves, 1.0, run.seed)
    run.gradients.close(torch.zeros(len(leaves)))
    return {slot.name: slot.master.grad.clone() for slot in learning(run)}  # type: ignore[union-attr]


def learning(run: Run) -> list[Slot]:
    return [slot for slot in run.local.slots if not slot.alias]


def test_each_sample_is_clipped_by_its_whole_gradient(tmp_path: Path) -> None:
    """Against a loop over samples with plain autograd; of the tied weight both uses count together."""
    run, feed = one_run(tmp_path, {"noise": 0.0, "clip": 0.4})
    leaves = feed.fetch(0, run.leaves)
    (stage,) = run.local.stages.values()
    expected = {slot.name: torch.zeros_like(slot.master) for slot in learning(run)}
    lives = {slot.name: slot.live for slot in run.local.slots}
    norms = []
    for leaf in leaves:
        for i in range(len(leaf.samples)):
            rows = slice(i, i + 1)
            loss = stage.loss(
                stage(leaf.inputs[rows], Noise(run.seed, leaf.samples[rows])), leaf.targets[rows]
            )
            grads = dict(
                zip(lives, torch.autograd.grad(loss / leaf.targets[rows].numel(), [*lives.values()]))
            )
            for alias, owner in run.local.owners.items():
                grads[owner] = grads[owner] + grads.pop(alias)
            norms.append(math.sqrt(sum(float(g.square().sum()) for g in grads.values())))
            for name, grad in grads.items():
                expected[name] += grad * min(1.0, 0.4 / norms[-1]) / 8
    assert run.local.owners and max(norms) > 0.4
    for name, grad in gradients(run, leaves).items():
        assert torch.allclose(grad, expected[name], rtol=1e-10, atol=1e-14), name


def test_the_noise_has_its_size_and_is_new_in_each_step(tmp_path: Path) -> None:
    quiet, feed = one_run(tmp_path, {"noise": 0.0, "clip": 0.4})
    noisy, _ = one_run(tmp_path, {"noise": 3.0, "clip": 0.4})
    leaves = feed.fetch(0, quiet.leaves)
    without, seen = gradients(quiet, leaves), []
    for step in (0, 1, 0):
        noisy.gradients.forget()
        noisy.step = step
        noise = [grad - without[name] for name, grad in gradients(noisy, leaves).items()]
        seen.append(torch.cat([x.flatten() for x in noise]) * 8.0)
    assert seen[0].std().item() == pytest.approx(3.0 * 0.4, rel=0.05)
    assert abs(seen[0].mean().item()) < 0.05
    assert abs(torch.corrcoef(torch.stack(seen[:2]))[0, 1].item()) < 0.05
    assert torch.allclose(seen[0], seen[2], atol=1e-12)


def test_a_sample_moves_the_sum_by_the_bound_at_most(tmp_path: Path) -> None:
    """Whatever it holds: its gradient may be huge, or no number."""
    run, feed = one_run(tmp_path, {"noise": 0.0, "clip": 0.25})
    leaves = feed.fetch(0, run.leaves)
    for slot in learning(run):
        slot.live.data.mul_(50.0)
    whole = gradients(run, leaves)
    run.gradients.forget()
    first = leaves[0]
    fewer = replace(first, **{key: getattr(first, key)[1:] for key in ("inputs", "targets", "samples")})
    less = gradients(run, [fewer, *leaves[1:]])
    moved = math.sqrt(sum(float((whole[name] - less[name]).square().sum()) for name in whole)) * 8
    assert 0.0 < moved <= 0.25 * (1.0 + 1e-9)


def test_gradients_that_are_no_numbers_add_nothing() -> None:
    grads = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [0.0, 0.0], [math.inf, 0.0], [0.3, 0.4]])
    squares = squares_of([grads], 5, grads.device)
    factors = clipping(squares, 1.0)
    assert factors.tolist() == pytest.approx([0.2, 0.0, 1.0, 0.0, 1.0])
    assert weighted_sum(factors, grads).tolist() == pytest.approx([0.9, 1.2])
    assert clipping(squares, math.inf).tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]


# Poisson batches ------------------------------------------------------------------------------------------


def poisson(folder: Path, batch: int, seed: int = 0) -> tuple[Poisson, int]:
    data = load(recipe(folder).data, recipe(folder).model).train
    return Poisson(data, key_of_seed(seed), batch, 1), len(data)


def test_batches_are_as_large_as_chance_says(tmp_path: Path) -> None:
    feed, samples = poisson(tmp_path, 16)
    sizes = np.array([len(feed.chosen(step)) for step in range(1500)])
    rate = 16 / samples
    assert sizes.mean() == pytest.approx(16, abs=5 * math.sqrt(16 / 1500))
    assert sizes.var() == pytest.approx(samples * rate * (1 - rate), rel=0.2)
    counts = np.bincount(np.concatenate([feed.chosen(step) for step in range(1500)]), minlength=samples)
    assert counts.min() > 0 and counts.std() == pytest.approx(math.sqrt(1500 * rate * (1 - rate)), rel=0.3)


def test_leaves_are_the_batch_whoever_asks(tmp_path: Path) -> None:
    feed, samples = poisson(tmp_path, 8)
    other, _ = poisson(tmp_path, 8, seed=1)
    for step in (0, 5, 2):
        whole = feed.fetch(step, range(8))
        apart = [feed.fetch(step, range(i, i + 1))[0] for i in range(8)]
        places = torch.cat([leaf.samples for leaf in whole])
        assert torch.equal(places, torch.cat([leaf.samples for leaf in apart]))
        assert (places - step * samples).tolist() == feed.chosen(step).tolist()
        assert feed.chosen(step).tolist() != other.chosen(step).tolist()
        assert [n for i in range(8) for n in feed.samples_of(step, i)] == feed.chosen(step).tolist()
        assert feed.share(step, range(8)) == pytest.approx(1.0 if len(places) else 0.0)


def test_a_batch_of_no_samples_survives(tmp_path: Path) -> None:
    """The update is the noise alone, and the step counts."""
    run, feed = one_run(tmp_path, USUAL, global_batch=2, micro_batch=1)
    inner = feed._inner
    empty = next(step for step in range(200) if not len(inner.chosen(step)))
    run.step = empty
    before = {slot.name: slot.master.detach().clone() for slot in learning(run)}
    report = train_step(run, feed.fetch(run.step, run.leaves))
    assert report.loss == 0.0 and report.finite and run.step == empty + 1
    assert report.norm == pytest.approx(0.3 / 2 * math.sqrt(sum(x.numel() for x in before.values())), rel=0.1)
    assert all(not torch.equal(before[slot.name], slot.master) for slot in learning(run))


def test_all_samples_in_each_step(tmp_path: Path) -> None:
    _, samples = poisson(tmp_path, 1)
    feed, _ = poisson(tmp_path, samples)
    assert len(feed.chosen(3)) == samples


# Epsilon ---------------------------------------------------------------------------------------------------


def test_each_step_tells_an_epsilon_that_holds(threads: Any, tmp_path: Path) -> None:
    for accountant, of in (("rdp", rdp_epsilon), ("prv", prv_epsilon)):
        keys = {**USUAL, "accountant": accountant}
        (end,) = threads(weights_after, 1, group=False, folder=str(tmp_path), plan="dp=1", keys=keys)
        data = load(recipe(tmp_path).data, recipe(tmp_path).model).train
        expected = [of([SampledGaussian(1.0, 8 / len(data), step)], 1e-5) for step in (1, 2, 3)]
        assert end["epsilons"] == pytest.approx(expected)


def test_marks_are_never_below_the_epsilon_of_a_step() -> None:
    budget = budget_of(PrivacyConfig(noise=1.0, accountant="rdp"), 10, 1000, 105)
    assert all(budget.epsilon(budget.mark(step)) >= budget.epsilon(step) for step in range(1, 106))
    assert budget.mark(105) == 105 and budget.mark(200) == 200
    assert len({budget.mark(step) for step in range(1, 106)}) <= 22


def test_an_accountant_is_asked_seldom(tmp_path: Path) -> None:
    asked = []
    run, _, _ = started(ALONE, private(tmp_path, None), "dp=1")
    budget = Budget(
        1.0, 0.01, True, 1e-5, lambda history, delta: float(len(asked.append(history) or asked)), 100
    )
    tell = made_private(run, 1.0, budget, key_of_seed(0)).update.after[-1]
    for run.step in range(100):
        tell(Verdict.APPLY)
    assert len(asked) <= 22


def test_the_noise_follows_from_a_target() -> None:
    budget = budget_of(PrivacyConfig(target_epsilon=3.0, accountant="rdp"), 10, 1000, 100)
    assert budget.epsilon(100) <= 3.0 < replace(budget, noise=budget.noise - 1e-3).epsilon(100)


def test_shuffled_batches_are_counted_by_epoch() -> None:
    budget = budget_of(PrivacyConfig(noise=1.0, accountant="rdp", sampling="shuffle"), 10, 1000, 1000)
    assert budget.epsilon(1) == budget.epsilon(100) == rdp_epsilon([SampledGaussian(1.0, 1.0, 1)], 1e-5)
    assert budget.epsilon(101) == rdp_epsilon([SampledGaussian(1.0, 1.0, 2)], 1e-5)


@pytest.mark.parametrize("was, now", [(USUAL, {**USUAL, "noise": 0.5}), (USUAL, None), (None, USUAL)])
def test_a_run_that_goes_on_keeps_its_privacy(tmp_path: Path, was: Any, now: Any) -> None:
    state = {"recipe": private(tmp_path, was).model_dump(mode="json")}
    check_fits(state, private(tmp_path, was), "", tmp_path)
    with pytest.raises(UsageError, match="the run was begun with privacy") as caught:
        check_fits(state, private(tmp_path, now), "", tmp_path)
    assert caught.value.code == "K05"


def test_a_target_holds_for_its_steps_alone(tmp_path: Path) -> None:
    keys = {"target_epsilon": 3.0}
    state = {"recipe": private(tmp_path, keys).model_dump(mode="json")}
    with pytest.raises(UsageError, match=r"train\.steps = 4, not 9"):
        check_fits(state, private(tmp_path, keys, steps=9), "", tmp_path)


# Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        "cp=2",
        "tp=2:chunks=2",
        "shard=2 zero=3:wire=int8",
        "pp=2 schedule=dualpipe micros=4",
        "pp=2 schedule=pipedream",
        "dp=2 codec=int8",
        "dp=2 sync=local_sgd:h=2",
        "recompute=full",
    ],
)
def test_plans_whose_ranks_lack_gradients_are_refused(tmp_path: Path, plan: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        resolve(private(tmp_path, USUAL, dtype="float32"), plan)
    assert any(problem.code == "P40" and "privacy" in problem.where for problem in caught.value.problems)


@pytest.mark.parametrize(
    "keys, word",
    [
        ({}, "neither"),
        ({"noise": 1.0, "target_epsilon": 2.0}, "both"),
        ({"noise": 1.0, "clip": math.inf}, "infinite"),
    ],
)
def test_sections_that_say_too_little_or_too_much_are_refused(
    tmp_path: Path, keys: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigProblems, match=word):
        resolve(private(tmp_path, keys), "dp=1")


@pytest.mark.parametrize(
    "train", [{"guard": 1}, {"spike": 5.0}, {"on_bad": "skip"}, {"quarantine": True}, {"compile": True}]
)
def test_what_looks_at_samples_without_noise_is_refused(tmp_path: Path, train: dict[str, Any]) -> None:
    with pytest.raises(ConfigProblems, match=f"train.{next(iter(train))}"):
        resolve(private(tmp_path, USUAL, **train), "dp=1")


def test_models_that_mix_samples_are_refused(tmp_path: Path) -> None:
    usual = private(tmp_path, USUAL)
    mixed = usual.model_copy(
        update={
            "model": ModelConfig.model_validate(
                {"kind": "moe", "n_layer": 1, "n_head": 2, "d_model": 16, "context": 8}
            )
        }
    )
    with pytest.raises(UsageError, match="routes the samples of a batch together") as caught:
        started(ALONE, mixed, "dp=1")
    assert caught.value.code == "P41"


def test_a_model_that_torch_cannot_map_is_refused_with_a_way_out(tmp_path: Path) -> None:
    run, feed = one_run(tmp_path, USUAL)
    (stage,) = run.local.stages.values()
    stage.loss = lambda y, targets: y.sum() if float(y.detach().sum()) > 0.0 else y.sum() * 2.0
    with pytest.raises(UsageError, match=r"micro_batch 1|by sample") as caught:
        train_step(run, feed.fetch(0, run.leaves))
    assert "--train.micro_batch 1" in caught.value.fix
