"""`check_gradients` inside its processes: import the user's module, call the function, leave its tensors in a file."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.launch.context import RankContext
from unisono.library.gradient_check import SCRIPT
from unisono.spec.errors import UserCodeError
from unisono.spec.finder import executed
from unisono.verify.user import plain_name


def prepare(argument: dict[str, Any]) -> Callable[..., Any]:
    """In the helper: the function, found again where it was defined."""
    module = _module(argument["module"], argument["file"])
    found: Any = module
    for part in argument["name"].split("."):
        found = getattr(found, part)
    return found


def _module(name: str, file: str) -> ModuleType:
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ImportError:
            name = Path(file).stem
    name = SCRIPT if name == "__main__" else name
    if name not in sys.modules:
        return executed(file, name, "check_gradients")
    return sys.modules[name]


def main(ctx: RankContext, argument: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """One process alone calls function(), each of several function(ctx)."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, argument["dtype"]))
    alone = argument["alone"]
    if not alone:
        dist.init_process_group(ctx.backend, store=ctx.store, rank=ctx.rank, world_size=ctx.world)
    got = function() if alone else function(ctx)
    parts: list[Any] = list(got) if isinstance(got, Sequence) and alone else [got]
    order: dict[str, None] = {}
    for i, part in enumerate(parts):
        folder = Path(argument["folder"]) / (f"part-{i:04d}" if alone else f"rank-{ctx.rank:04d}")
        whole = _whole(part, argument["name"])
        order |= dict.fromkeys(whole)
        save_file(whole, folder)
    return {"parts": len(parts), "order": list(order), "cut": [] if alone else _dtensors(parts[0])}


def _whole(part: Any, name: str) -> dict[str, Tensor]:
    if not isinstance(part, Mapping) or not part or not all(isinstance(x, Tensor) for x in part.values()):
        kind = type(part).__name__
        raise UserCodeError(f"{name} returned {kind}, not a mapping from names to gradients", code="R01")
    found = {}
    for (
        key,
        x,
    ) in part.items():  # gathering a DTensor is a collective: all ranks do it in the order of their names
        x = x.detach()
        found[plain_name(str(key))] = (
            (x.full_tensor() if isinstance(x, DTensor) else x).contiguous().clone().cpu()
        )
    return found


def _dtensors(part: Mapping[str, Tensor]) -> list[str]:
    return [plain_name(str(key)) for key, x in part.items() if isinstance(x, DTensor)]
