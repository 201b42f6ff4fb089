"""One plan, played for a while: the part of `cpu_truth` and of `auto_truth` that every rank plays."""

from typing import Any

import lab
import torch
import torch.distributed as dist

from unisono.config import Recipe
from unisono.launch.context import RankContext
from unisono.measure import steps
from unisono.train.build import connect
from unisono.train.session import place_of


def main(ctx: RankContext, argument: dict[str, Any], shared: object) -> dict[str, Any]:
    """argument: recipe, plan, seconds; hosts: of the lab, dealt to the ranks in runs. → medians by part, peak."""
    hosts = argument["hosts"]
    if hosts:
        lab.enter(hosts[ctx.rank * len(hosts) // ctx.world])
    place = place_of(ctx.rank, ctx.world, 0, "gloo", 600.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    recipe = Recipe.model_validate_json(argument["recipe"])
    seen = steps.play(recipe, argument["plan"], place, agree, argument["seconds"])
    return {"parts": seen.medians, "peak": steps.resident()}


def agree(number: float) -> float:
    """The greatest that a rank gives."""
    box = torch.tensor([number], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box.item())
