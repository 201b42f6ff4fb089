"""`unisono plan --check`, inside a rank: one plan, played for a while on made-up tokens."""

from typing import Any

import torch
import torch.distributed as dist

from unisono.config import Recipe
from unisono.launch.context import RankContext
from unisono.measure import steps
from unisono.train.build import connect
from unisono.train.session import place_of


def main(ctx: RankContext, argument: dict[str, Any], shared: object) -> dict[str, Any]:
    """argument: recipe, plan, seconds. → the median step's seconds by part, and the peak of memory in bytes."""
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    recipe = Recipe.model_validate_json(argument["recipe"])
    seen = steps.play(recipe, argument["plan"], place, agree, argument["seconds"])
    return {"parts": seen.medians, "step": seen.medians["step"], "peak": steps.resident()}


def agree(number: float) -> float:
    """The greatest that a rank gives; all wait for all."""
    box = torch.tensor([number], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box.item())
