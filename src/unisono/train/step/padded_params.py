"""Stand-ins that an optimiser steps in the place of parameters: lines whose length fills vector registers, so that each
element has the same bits wherever a tensor is cut, in the dtype of gradients, which parameters without masters are not.

Of such parameters a few have stand-ins at a time: their numbers in fp32 are there only while they are stepped.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.offload.streaming import only, parts_of

LANES = 64  # bytes of the widest vector register

Keep = Callable[[nn.Parameter, Tensor], Tensor]  # a master and what it has become → what it can hold of that


def lanes(master: nn.Parameter) -> int:
    """Elements of its gradient that fill a register."""
    return LANES // master.new_empty(0, dtype=master.grad_dtype).element_size()


def line_for(master: nn.Parameter) -> nn.Parameter:
    """A stand-in whose length fills vector registers. Torch's fused kernels round the last few elements of a tensor
    (those that do not fill a register) in another way than the rest, and which those are depends on the cut."""
    return nn.Parameter(_zeros(master))


def row_for(master: nn.Parameter) -> nn.Parameter:
    """A stand-in for rows of a table, one register long until there are some."""
    return nn.Parameter(master.new_zeros(lanes(master)))


def is_narrow(master: nn.Parameter) -> bool:
    """Whether a parameter holds fewer digits than the optimiser steps in."""
    return master.dtype != master.grad_dtype


def pair(optimizer: Optimizer, pairs: Mapping[nn.Parameter, nn.Parameter], keep: Keep) -> None:
    """Step the stand-ins, by master, and keep masters and their state as views of what they hold."""
    for master, stand_in in pairs.items():
        n = master.numel()
        optimizer.state[master] = {
            key: value[:n].view(master.shape) if value.dim() else value
            for key, value in optimizer.state[stand_in].items()
        }
        _rest(master, stand_in)

    @torch.no_grad()
    def before(optimizer: Optimizer, *_: object) -> None:
        for master, stand_in in _here(optimizer, pairs):
            if master.grad is None:
                stand_in.grad = None
                continue
            if is_narrow(master):
                stand_in.data = _zeros(master)
            if stand_in.grad is None:
                stand_in.grad = torch.zeros_like(stand_in)
            n = master.numel()
            # Weights that are offloaded are read where they lie.
            stand_in[:n].copy_(at_home(master).reshape(-1))
            stand_in.grad[:n].copy_(master.grad.reshape(-1))

    @torch.no_grad()
    def after(optimizer: Optimizer, *_: object) -> None:
        scaled = getattr(optimizer, "grad_scale", None) is not None
        for master, stand_in in _here(optimizer, pairs):
            if master.grad is None:
                continue
            at_home(master).copy_(keep(master, stand_in[: master.numel()].view(master.shape)))
            if scaled and stand_in.grad is not None:  # as the kernel left it
                master.grad.copy_(stand_in.grad[: master.numel()].view(master.shape))
            _rest(master, stand_in)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    if any(map(is_narrow, pairs)):
        _in_parts(optimizer)


def _zeros(master: nn.Parameter) -> Tensor:
    width = lanes(master)
    return master.new_zeros(-(-master.numel() // width) * width, dtype=master.grad_dtype)


def _rest(master: nn.Parameter, stand_in: nn.Parameter) -> None:
    """Between steps nothing stands for a parameter without a master."""
    if is_narrow(master):
        stand_in.grad, stand_in.data = None, stand_in.new_empty(0)


def _here(
    optimizer: Optimizer, pairs: Mapping[nn.Parameter, nn.Parameter]
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The pairs that the optimiser steps now."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return ((master, stand_in) for master, stand_in in pairs.items() if id(stand_in) in stepped)


def _in_parts(optimizer: Optimizer) -> None:
    """Let `step` go through a few parameters at a time."""
    whole = optimizer.step

    def step(closure: Any = None) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for part in parts_of(params, optimizer):
            with only(optimizer, part):
                whole()

    optimizer.step = step  # type: ignore[method-assign]
