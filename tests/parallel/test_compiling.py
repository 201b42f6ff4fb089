"""Compiled blocks under every axis give the losses of blocks that are not compiled.

Graphs are traced and differentiated as for Inductor, and then run as they are (`aot_eager`): its C++ takes minutes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.small import recipe, started
from unisono.parallel.compiling import SAID
from unisono.plan import Plan

PLANS = ("dp=1", "dp=2 zero=3:gather=int8", "shard=2 zero=3:wire=int8,prefetch=1", "tp=2", "pp=2 recompute=full", "cp=2 cp_kind=ulysses",
         "shard=2 tp=2", "tp=2:chunks=2")  # fmt: skip


def losses(ctx: Any, folder: str, plan: str, compiled: bool) -> Any:
    from unisono.train.step.train_step import train_step

    run, feed, _ = started(ctx, recipe(Path(folder), global_batch=4, compile=compiled), plan)
    found = [train_step(run, feed.fetch(step, run.leaves)).loss for step in range(2)]
    return found, all(name in vars(run.mesh.tp) for name in SAID)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("plan", PLANS)
def test_compiled_blocks_lose_what_others_do(
    threads: Any, tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: usual(self, backend="aot_eager"))
    ranks = Plan.parse(plan).world
    given = {"folder": str(tmp_path), "plan": plan, "group": ranks > 1, "timeout": 300.0}
    plain = threads(losses, ranks, compiled=False, **given)
    made = threads(losses, ranks, compiled=True, **given)
    for (want, outside), (got, said) in zip(plain, made, strict=True):
        assert got == pytest.approx(want, rel=1e-12) and said and not outside
