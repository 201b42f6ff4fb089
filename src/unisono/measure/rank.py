"""`calibrate` and `plan --check`, inside a rank: kernels and steps of ranks alone, then of all together."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.device import count, is_apart, properties
from unisono.comm.mesh import Mesh, Shape
from unisono.config import Recipe
from unisono.launch.context import RankContext
from unisono.measure import collectives, kernels, steps
from unisono.measure.recipes import sized
from unisono.observe.span import Recorder
from unisono.train.build.build import Place, connect, place_of

PRODUCTS = [(m, k, n) for m in (64, 512, 2048) for k in (64, 256, 1024) for n in (64, 256, 1024)]
COPIES = [1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
SIZES = [1 << shift for shift in (12, 14, 16, 18, 20, 22, 24)]
LARGE = [1 << 26, 1 << 28]
ON_GPU = [(8192, 8192, 8192), (16384, 8192, 8192), (4096, 12288, 4096)]


def main(ctx: RankContext, argument: dict[str, Any], shared: object) -> dict[str, Any]:
    """`argument["ask"]`: `devices` (how many GPUs), `alone` (every rank for itself, all at once), `together`, or `plan`
    (one, played for a while on made-up tokens: the median step's seconds, and the peak of memory in bytes)."""
    if argument["ask"] == "devices":
        return {"gpus": count()}
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    match argument["ask"]:
        case "alone":
            return _alone(ctx, place, argument)
        case "together":
            return _together(ctx, place, argument)
    recipe = Recipe.model_validate_json(argument["recipe"])
    seen = steps.play(recipe, argument["plan"], place, agree, argument["seconds"])
    return {"parts": seen.medians, "step": seen.medians["step"], "peak": steps.resident()}


def agree(number: float) -> float:
    """The greatest that a rank gives; all wait for all."""
    box = torch.tensor([number], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box.item())


def _alone(ctx: RankContext, place: Place, argument: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"device": place.device.type}
    agree(0.0)
    if argument["kernels"]:
        dtypes = ["float32", "bfloat16"] if is_apart(place.device) else ["float32"]
        for dtype in dtypes:
            shapes = PRODUCTS + (ON_GPU if is_apart(place.device) else [])
            found[dtype] = kernels.products(shapes, place.device, getattr(torch, dtype))
        found["copies"] = kernels.copies(COPIES, place.device)
        found["launch"] = kernels.launch(place.device)
        found |= properties(place.device)
    single = place_of(0, 1, ctx.local_rank, ctx.backend, 600.0)
    found["steps"] = []
    for ask in argument["steps"]:
        if argument["kernels"]:
            # Who waits for nobody counts the time for which it has a core, whatever else the machine does.
            found["steps"].append(_played(ask, single, "dp=1", argument["least"], time.thread_time_ns).quiet)
        else:  # where ranks share cores a quiet moment is one in which the others wait
            found["steps"].append(_played(ask, single, "dp=1", argument["least"]).medians)
    return found


def _together(ctx: RankContext, place: Place, argument: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": [], "calls": []}
    if argument["collectives"]:
        mesh = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), place.timeout)
        found["collectives"] = collectives.timed(
            mesh.dp, SIZES + (LARGE if is_apart(place.device) else []), place.device
        )
    for ask in argument["steps"]:
        seen = _played(ask, place, ask["plan"], argument["least"])
        found["steps"].append(seen.medians)
        found["calls"].append(steps.means(seen.calls))
    return found | {"peak": steps.resident()}


def _played(
    ask: dict[str, Any], place: Place, plan: str, least: float,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> steps.StepTimes:  # fmt: skip
    given = sized(ask["sizes"], ask["batch"], ask.get("micro_batch"), ask.get("dropout", 0.0))
    return steps.play(given, plan, place, agree, least, fewest=3, clock=clock)
