"""The loop: where it ends, what it leaves alone, and that all ranks see the same of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.spec.training import METRICS
from unisono.train.step.evaluate import evaluate
from unisono.train.step.train_step import train

PLANS = [("dp=2", 2), ("pp=2", 2), ("tp=2", 2), ("shard=2", 2), ("dp=2 sync=canonical", 2), ("dp=2 pp=2", 4)]


def asked_to_stop(ctx: Any, told: Any, plan: str) -> list[tuple[int, bool]]:
    """Only the last rank is asked, in its third step."""
    run, feed, _ = started(ctx, told, plan)
    steps = []
    for report in train(run, feed, 4, lambda: ctx.rank == ctx.world - 1 and len(steps) == 2):
        steps.append((report.step, report.stop))
    return [*steps, (run.step, False)]


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_all_ranks_stop_in_the_same_step(threads: World, tmp_path: Path, plan: str, ranks: int) -> None:
    ended = threads(asked_to_stop, ranks, told=recipe(tmp_path), plan=plan)
    assert ended == [[(0, False), (1, False), (2, True), (3, False)]] * ranks


def gone_bad(ctx: Any, told: Any, plan: str) -> dict[str, Any]:
    """The last rank's largest weight becomes infinite after the second step."""
    run, feed, _ = started(ctx, told, plan)
    reports = []
    for report in train(run, feed, 4):
        reports.append(report)
        if len(reports) == 2:
            if ctx.rank == ctx.world - 1:
                max((slot.master for slot in run.local.slots), key=torch.Tensor.numel).data.view(-1)[0] = (
                    math.inf
                )
            before = [slot.master.clone() for slot in run.local.slots]
    same = [torch.equal(slot.master, was) for slot, was in zip(run.local.slots, before, strict=True)]
    return {
        "steps": [r.step for r in reports],
        "finite": reports[-1].finite,
        "made": run.step,
        "same": all(same),
    }


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_a_number_that_is_not_finite_ends_it_and_changes_nothing(
    threads: World, tmp_path: Path, plan: str, ranks: int
) -> None:
    for end in threads(gone_bad, ranks, told=recipe(tmp_path), plan=plan):
        assert end == {"steps": [0, 1, 2], "finite": False, "made": 2, "same": True}


def numbers(ctx: Any, told: Any, plan: str) -> dict[str, list[float]]:
    run, feed, val = started(ctx, told, plan)
    reports = list(train(run, feed, 3))
    return {
        "loss": [r.loss for r in reports],
        "norm": [r.norm for r in reports],
        "val": [evaluate(run, [val.fetch(i, run.leaves) for i in range(2)])[0]],
    }


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_every_rank_reports_what_one_device_reports(
    threads: World, tmp_path: Path, plan: str, ranks: int
) -> None:
    told = recipe(tmp_path)
    alone, *_ = threads(numbers, 1, group=False, told=told, plan="dp=1")
    first, *others = threads(numbers, ranks, told=told, plan=plan)
    assert all(other == first for other in others)
    for key, values in first.items():
        assert values == pytest.approx(alone[key], rel=1e-10), key


def metrics(ctx: Any, told: Any, plan: str) -> dict[str, float]:
    """Of a validation after two steps under a smoothed loss, beside that loss."""
    told = told.model_copy(
        update={"train": told.train.model_copy(update={"loss": "cross_entropy:smoothing=0.2"})}
    )
    run, feed, val = started(ctx, told, plan)
    before = [stage.loss for stage in run.local.stages.values()]
    list(train(run, feed, 2))
    chosen = [METRICS.read(name) for name in METRICS.names()]
    loss, values = evaluate(run, [val.fetch(i, run.leaves) for i in range(2)], chosen)
    assert [stage.loss for stage in run.local.stages.values()] == before
    return {"loss": loss, **values}


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_metrics_are_those_of_one_device_under_another_loss_too(
    threads: World, tmp_path: Path, plan: str, ranks: int
) -> None:
    told = recipe(tmp_path)
    (alone,) = threads(metrics, 1, group=False, told=told, plan="dp=1")
    assert 0 < alone["accuracy"] < 1 and alone["perplexity"] == pytest.approx(math.exp(alone["loss"]))
    for values in threads(metrics, ranks, told=told, plan=plan):
        assert values == pytest.approx(alone, rel=1e-10)
