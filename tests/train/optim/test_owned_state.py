"""A run whose optimiser's state lies with owners goes on under another plan as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.config import Recipe
from unisono.plan import Plan
from unisono.train.state.checkpoint import Saver, latest
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train

Parts = dict[str, tuple[torch.Tensor, tuple[int, ...]]]
SAVED, END = 1, 3  # the second step goes by saved roots, the third decomposes saved means


def played(ctx: Any, told: Recipe, plan: str, until: int, begun: Path | None, folder: Path | None) -> Parts:
    """This rank's weights and state, by name with where each begins, after `until` steps. begun: from this checkpoint.
    folder: of the run, to save the last step."""
    run, feed, _ = started(ctx, told, plan)
    if begun is not None:
        restore(run, begun)
        assert run.step == SAVED
    for _ in train(run, feed, until):
        pass
    pieces = pieces_of(run)
    if folder is not None:
        saver = Saver(folder, ctx.rank, ctx.world, token=plan)
        saver.save(run.step, [*pieces, *kept_of(run)], {"step": run.step})
    return {box.name: (box.tensor.detach().clone(), tuple(box.start)) for box in pieces}


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_a_run_goes_on_under_another_plan(threads: World, tmp_path: Path, name: str) -> None:
    told = recipe(tmp_path, optimizer=name, clip=1.0, steps=END, curvature_interval=2)

    def ranks(plan: str, until: int, begun: Path | None = None, folder: Path | None = None) -> list[Parts]:
        text = f"{plan} precision=fp64"
        count = Plan.parse(plan).world
        return threads(played, count, told=told, plan=text, until=until, begun=begun, folder=folder)

    first, unbroken = "dp=2 shard=2", ranks("dp=2 shard=2", END)
    ranks(first, SAVED, folder=tmp_path / "run")
    begun = latest(tmp_path / "run")
    assert begun is not None
    for there, here in zip(unbroken, ranks(first, END, begun), strict=True):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[key][0], here[key][0]) for key in there)
    (whole,) = ranks("dp=1", END)
    for plan in ("tp=2", "dp=1"):
        for parts in ranks(plan, END, begun):
            for key, (x, start) in parts.items():
                at = tuple(slice(a, a + n) for a, n in zip(start, x.shape, strict=True))
                want = whole[key][0][at]
                apart = 1e-7 * float(whole[key][0].abs().max())  # roots of small eigenvalues are large
                assert torch.allclose(x, want, rtol=1e-6, atol=apart), (plan, key)
