"""torch's own hooks of DDP, played on one bucket: what they cost, beside our codecs. Imports torch: rank side only."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = ("torch fp16 hook", "torch bf16 hook", "torch PowerSGD hook, rank 4")
_RANK = 4
_WARM = 3  # calls: PowerSGD begins with the third


class HookBucket:
    """As much of DDP's bucket as a hook asks for: one gradient, a square matrix where it can be one."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        side = int(flat.numel() ** 0.5)
        rest = flat[side * side :]
        self._gradients = [flat[: side * side].view(side, side), *([rest] if rest.numel() else [])]

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def parameters(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def alone_in_a_group(rank: int) -> dist.ProcessGroup:
    """A group of this process alone. Every rank calls it."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
        )
        rank = 0
    return dist.new_group([rank], use_local_synchronization=True, backend="gloo")  # type: ignore[return-value]


def hook_of(name: str, group: dist.ProcessGroup) -> tuple[Any, Callable[..., Any]]:
    """(state, hook) as one gives them to `DistributedDataParallel.register_comm_hook`."""
    match name:
        case "torch fp16 hook":
            return group, default_hooks.fp16_compress_hook
        case "torch bf16 hook":
            return group, default_hooks.bf16_compress_hook
    state = powerSGD_hook.PowerSGDState(
        process_group=group, matrix_approximation_rank=_RANK, start_powerSGD_iter=2
    )
    return state, powerSGD_hook.powerSGD_hook


def hook_call(name: str, gradient: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """One exchange by a hook in a group of one, where nothing travels. Raises what DDP raises where it refuses it."""
    state, hook = hook_of(name, group)
    ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    ddp.register_comm_hook(state, hook)
    bucket = HookBucket(gradient.clone())
    call = partial(_played, hook, state, bucket)
    for _ in range(_WARM):
        call()
    return call


def _played(hook: Callable[..., Any], state: Any, bucket: HookBucket) -> None:
    with torch.no_grad():
        hook(state, bucket).wait()
