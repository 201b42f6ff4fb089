"""A collective from a file outside the package, as docs/collectives.md shows it, trains as the package's own do."""

import re
from pathlib import Path

import pytest

from tests.train.small import recipe, started
from unisono.train.step.train_step import train_step

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"

pytestmark = pytest.mark.timeout(120)


def trained(ctx, told, plan, steps=4):
    """Losses, weights, and bytes that this rank sends to sum gradients."""
    run, feed, _ = started(ctx, told, plan)
    losses, sent = [], 0
    for step in range(steps):
        losses.append(train_step(run, feed.fetch(step, run.leaves)).loss)
        sent += run.recorder.lap().nbytes["dp", "all_reduce"]
    return {
        "losses": losses,
        "weights": [slot.master.clone() for slot in run.local.slots],
        "sent": sent,
        "says": run.mesh.dp.says(),
    }


@pytest.fixture
def own(tmp_path):
    """The page's class, in a file of its own."""
    text = next(
        body
        for body in re.findall(r"```python run\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "BothWays" in body
    )
    (tmp_path / "mine.py").write_text(text)
    return f"{tmp_path}/mine.py:BothWays"


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_trains_to_the_same_loss_within_rounding(threads, own, tmp_path, ranks) -> None:
    told = recipe(tmp_path, global_batch=12)
    by = {
        name: threads(trained, ranks, told=told, plan=f"dp={ranks} precision=fp64 collective={name}")
        for name in (own, "engine")
    }
    for mine, theirs in zip(by[own], by["engine"], strict=True):
        assert mine["says"].startswith("both_ways") and mine["sent"] == pytest.approx(
            theirs["sent"], rel=1e-3
        )
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-12)
        assert mine["losses"][-1] < mine["losses"][0]
        for x, y in zip(mine["weights"], theirs["weights"], strict=True):
            assert (x - y).abs().max() <= 1e-9 * y.abs().max().clamp(min=1e-3)
        assert all(x.equal(y) for x, y in zip(mine["weights"], by[own][0]["weights"], strict=True)), (
            "replicas are equal"
        )
