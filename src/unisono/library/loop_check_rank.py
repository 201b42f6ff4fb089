"""`unisono.prove` of a loop inside its processes: play it, and leave the gradients of its first steps in files."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unisono.launch.context import RankContext
from unisono.library.enter import init
from unisono.library.gradient_check_rank import prepare
from unisono.library.job import Job

__all__ = ["main", "prepare"]


class Enough(BaseException):
    """The loop has made its steps; no handler of the user's takes it for an error."""


class GradientLog:
    """Gradients as each optimiser is about to step, in one file for each rank and step: `grad/NAME`, all shards of it
    together, and `own/NAME`, what this rank's own samples made of it before ranks met, where no shards are in the way.
    """

    def __init__(self, job: Job, folder: Path, kind: str, steps: int) -> None:
        self._job, self._folder, self._kind, self._left = job, folder, kind, steps
        self._models: list[nn.Module] = []
        self._own: dict[int, Tensor] = {}
        self._made = 0
        self._own_prepare, job.prepare = job.prepare, self._prepare  # type: ignore[method-assign]

    def _prepare(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *rest: Any, **more: Any
    ) -> Any:
        known = any(model is known for known in self._models)
        for p in [] if known else model.parameters():
            if p.requires_grad:
                p.register_hook(partial(self._arrived, id(p)))  # before `prepare` has hooks of its own there
        prepared = self._own_prepare(model, optimizer, *rest, **more)
        if not known:
            self._models.append(model)
        number = next(i for i, known in enumerate(self._models) if known is model)
        for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
            each.register_step_pre_hook(lambda own, *_: self._record(number, own))
        return prepared

    def _arrived(self, key: int, grad: Tensor) -> None:
        self._own[key] = grad.detach().clone() if key not in self._own else self._own[key] + grad.detach()

    def _record(self, number: int, optimizer: Optimizer) -> None:
        names = {id(p): name for name, p in self._models[number].named_parameters()}
        found: dict[str, Tensor] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                name = f"{number}.{names.get(id(p), 'unknown')}"
                found[f"grad/{name}"] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                if id(p) in self._own:
                    found[f"own/{name}"] = self._own.pop(id(p))
        if self._left == 0:
            raise Enough
        self._left -= 1
        kept = {name: x.detach().cpu().contiguous().clone() for name, x in found.items()}
        save_file(kept, self._folder / f"{self._kind}-{self._job.rank}-{self._made:04d}")
        self._made += 1


def main(ctx: RankContext, argument: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Every rank calls function(job)."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    if ctx.world == 1 and not dist.is_initialized():  # other libraries look for it, wherever RANK is set
        dist.init_process_group(ctx.backend, store=ctx.store, rank=0, world_size=1)
    job = init(argument["plan"], context=ctx)
    GradientLog(job, Path(argument["folder"]), argument["kind"], argument["steps"])
    try:
        function(job)
    except Enough:
        pass
    return {"notes": list(job.notes)}
