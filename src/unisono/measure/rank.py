"""`calibrate`, `plan --check` and `plan=auto`, inside a rank: kernels, all-reduces, and steps of a plan."""

from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.device import count, is_apart, properties
from unisono.comm.mesh import Mesh, Shape
from unisono.config import Recipe
from unisono.launch.context import RankContext
from unisono.measure import steps, timings
from unisono.observe.span import Recorder
from unisono.train.build.build import Place, connect, place_of

PRODUCTS = [(m, k, n) for m in (512, 2048) for k in (256, 1024) for n in (256, 1024)]
ON_GPU = [(8192, 8192, 8192), (16384, 8192, 8192), (4096, 12288, 4096)]
COPIES = [1 << 24, 1 << 26]
SIZES = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
LARGE = [1 << 26, 1 << 28]


def main(ctx: RankContext, argument: dict[str, Any], shared: object) -> dict[str, Any]:
    """`argument["ask"]`: `devices` (how many GPUs), `kernels` (every rank for itself, all at once), `all-reduces` (of
    all ranks), or `plan` (one, played for a while on made-up data: seconds of the median step by part, and the peak of
    memory in bytes)."""
    if argument["ask"] == "devices":
        return {"gpus": count()}
    resident = steps.resident()
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    match argument["ask"]:
        case "kernels":
            return {"resident": resident, **_kernels(place)}
        case "all-reduces":
            mesh = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), place.timeout)
            sizes = SIZES + (LARGE if is_apart(place.device) else [])
            return {"all_reduces": timings.all_reduces(mesh.dp, sizes, place.device)}
    recipe = Recipe.model_validate_json(argument["recipe"])
    medians = steps.play(recipe, argument["plan"], place, largest_of_all, argument["seconds"])
    return {"parts": medians, "step": medians["step"], "peak": steps.resident()}


def largest_of_all(number: float) -> float:
    """The greatest number that a rank has; all wait for all."""
    box = torch.tensor([number], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box.item())


def _kernels(place: Place) -> dict[str, Any]:
    """Seconds of products and of copies, all ranks at once; what the device is."""
    seconds: dict[str, Any] = {}
    largest_of_all(0.0)
    gpu = is_apart(place.device)
    for dtype in ("float32", "bfloat16") if gpu else ("float32",):
        seconds[dtype] = timings.products(
            PRODUCTS + (ON_GPU if gpu else []), place.device, getattr(torch, dtype)
        )
    seconds["copies"] = timings.copies(COPIES, place.device)
    return seconds | properties(place.device)
