"""What each part of a model takes: seconds of a forward and a backward with one micro-batch, on this device."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.device import synchronize
from unisono.comm.group import Group
from unisono.parallel.cut import Carry, carry_of, tensors_of

# Of which the first does not count, and the fastest does: what else the machine does makes none faster.
ROUNDS = 5


def measured_costs(
    model: nn.Module, sample: Tensor, world: Group, *, dtype: torch.dtype, device: torch.device
) -> tuple[list[float], float, float]:
    """Seconds of (each block, the stem, the head with the loss), the mean of all ranks, the same on each of them.

    model: whole, on the meta device or not; it is not changed, and one part at a time has tensors. sample: a meta
    tensor shaped like the inputs of one micro-batch. Every rank calls it, or it hangs.
    """
    draw = torch.Generator().manual_seed(0)
    x: Carry = _like(sample, draw, dtype, device)
    seconds = []
    for part in (model.stem, *model.blocks):  # type: ignore[misc,union-attr]
        took, x = _timed(lambda real, carry: real(carry, None), part, x, draw, dtype, device)  # type: ignore[arg-type]
        seconds.append(took)
    took, _ = _timed(lambda real, carry: real(carry), model.head, x, draw, dtype, device)  # type: ignore[arg-type]
    seconds.append(took)
    agreed = world.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=device)).tolist()
    stem, *blocks, head = (cost / world.size for cost in agreed)
    return blocks, stem, head


def _timed(
    call: Callable[[Any, Carry], Carry],
    part: nn.Module,
    entry: Carry,
    draw: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, Carry]:
    """(seconds of forward and backward, what it hands on)."""
    real = _real(part, draw, dtype, device)
    learns = [p for p in real.parameters() if p.requires_grad]
    best, out = float("inf"), entry
    for turn in range(ROUNDS):
        carry = carry_of(tuple(_leaf(x) for x in tensors_of(entry)))
        synchronize(device)
        begun = time.perf_counter()
        out = call(real, carry)
        outputs = [y for y in tensors_of(out) if y.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        synchronize(device)
        best = min(best, time.perf_counter() - begun) if turn else best
        for p in learns:
            p.grad = None
    return best, carry_of(tuple(y.detach() for y in tensors_of(out)))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _real(part: nn.Module, draw: torch.Generator, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of the part with small random numbers; values of its own stay, where it has any."""
    copied = copy.deepcopy(part)
    if any(p.is_meta for p in (*copied.parameters(), *copied.buffers())):
        copied = copied.to_empty(device=device)
        with torch.no_grad():
            for x in (*copied.parameters(), *copied.buffers()):
                x.copy_(_like(x, draw, x.dtype, device))
    return copied.to(device=device, dtype=dtype)


def _like(x: Tensor, draw: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small random numbers of this shape; zeros where they are whole numbers."""
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=x.dtype, device=device)
    return (torch.randn(x.shape, generator=draw, dtype=torch.float32) * 0.02).to(device=device, dtype=dtype)
