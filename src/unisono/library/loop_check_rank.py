"""`unisono.prove` of a loop inside its processes: play it, and leave the gradients of its first steps in files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
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
    """Gradients as each optimiser is about to step. All ranks gather, rank 0 writes."""

    def __init__(self, job: Job, folder: Path, kind: str, steps: int) -> None:
        self._job, self._folder, self._kind, self._left = job, folder, kind, steps
        self._models: list[nn.Module] = []
        self._made = 0
        self._own_prepare, job.prepare = job.prepare, self._prepare  # type: ignore[method-assign]

    def _prepare(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *rest: Any, **more: Any
    ) -> Any:
        prepared = self._own_prepare(model, optimizer, *rest, **more)
        if not any(model is known for known in self._models):
            self._models.append(model)
        number = next(i for i, known in enumerate(self._models) if known is model)
        for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
            each.register_step_pre_hook(lambda own, *_: self._record(number, own))
        return prepared

    def _record(self, number: int, optimizer: Optimizer) -> None:
        names = {id(p): name for name, p in self._models[number].named_parameters()}
        found: dict[str, Tensor] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                found[f"{number}.{names.get(id(p), 'unknown')}"] = whole.detach().cpu().contiguous().clone()
        if self._left == 0:
            raise Enough
        self._left -= 1
        if self._job.rank == 0:
            save_file(found, self._folder / f"{self._kind}-{self._made:04d}")
        self._made += 1


def main(ctx: RankContext, argument: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Every rank calls function(job)."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    job = init(argument["plan"], context=ctx)
    GradientLog(job, Path(argument["folder"]), argument["kind"], argument["steps"])
    try:
        function(job)
    except Enough:
        pass
    return {"notes": list(job.notes)}
