"""A model with experts is the same under every plan: losses, gradients, votes, and what its routers tell."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.config import ModelConfig, Recipe
from unisono.train.state.run_state import pieces_of
from unisono.train.step.train_step import train

STEPS = 2


def sparse(folder: Path, **model: Any) -> Recipe:
    sizes = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "dropout": 0.1, "d_expert": 12}
    return recipe(folder).model_copy(update={"model": ModelConfig(kind="moe", **(sizes | model))})


def played(ctx: Any, told: Any, plan: str) -> tuple[list[float], list[Any], list[Any]]:
    run, feed, _ = started(ctx, told, plan)
    reports = list(train(run, feed, STEPS))
    boxes = [(b.name, b.full_shape, b.start, b.tensor.clone()) for b in pieces_of(run) if b.saved]
    return [r.loss for r in reports], [dict(r.says["router"]) for r in reports], boxes


def whole(ranks: list[Any]) -> dict[str, torch.Tensor]:
    """What all ranks have saved, put together; NaN where nobody has."""
    out: dict[str, torch.Tensor] = {}
    for _, _, boxes in ranks:
        for name, shape, start, tensor in boxes:
            full = out.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            full[tuple(slice(a, a + n) for a, n in zip(start, tensor.shape, strict=True))] = tensor.double()
    return out


KINDS: dict[str, dict[str, Any]] = {
    "topk": {"aux_loss": 0.5, "z_loss": 0.001, "bias_rate": 0.01},
    "room": {"capacity_factor": 1.0, "n_shared_experts": 1, "activation": "swiglu", "moe_every": 2},
    "switch": {"router": "switch", "top_k": 1, "aux_loss": 0.01, "bias": False},
    "expert_choice": {"router": "expert_choice", "gate": "sigmoid"},
}
PLANS = {
    "topk": ("shard=2 ep=2", "tp=3 ep=3", "dp=2 shard=2 ep=2", "cp=2 shard=2 ep=2"),
    "room": ("tp=2 shard=2 ep=2", "tp=4 ep=2", "cp=2 tp=2 ep=4"),
    "switch": ("pp=2 tp=2 ep=2", "shard=4 ep=2", "cp=2"),
    "expert_choice": ("shard=2 tp=2 ep=4", "pp=2 shard=2 ep=2 recompute=full", "cp=2 ep=2"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_deal_experts_is_one_device(threads: World, tmp_path: Path, kind: str) -> None:
    told = sparse(tmp_path, n_head=4, n_experts=12, **KINDS[kind])
    one = threads(played, 1, group=False, told=told, plan="dp=1")
    want = whole(one)
    for plan in PLANS[kind]:
        ranks = 1
        for word in plan.split():
            key, _, value = word.partition("=")
            ranks *= int(value) if key in ("dp", "shard", "pp", "cp", "tp") else 1
        got = threads(played, ranks, told=told, plan=plan)
        for losses, routers, _ in got:
            assert losses == pytest.approx(one[0][0], rel=1e-12), plan
            assert routers == one[0][1], plan
        have = whole(got)
        assert have.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(have[name], value, rtol=1e-9, atol=1e-9, msg=f"{plan}: {name}")
