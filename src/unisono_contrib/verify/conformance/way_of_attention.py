"""What every way of attention under `cp` owes: it deals out all positions, and attends as one device does."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from unisono.comm.members import Shape
from unisono.comm.mesh import Mesh
from unisono.models.gpt.net import Core
from unisono.models.noise import Dropout, Noise, numbers
from unisono.observe.span import Recorder
from unisono.parallel.attend import ContextWay
from unisono.spec.layout import Places
from unisono_contrib.comm.threads import run

ROWS, HEADS, PAIRS, WIDTH, POSITIONS = 2, 12, 6, 4, 24
NEAR = 1e-12  # of numbers about 1, in float64


def faults(way: ContextWay, folder: Path, text: str) -> Iterator[str]:
    """On 2 and 3 ranks: 1. every position lies on one rank, in order there. 2. Outputs and gradients are those of one
    device, with dropout and without, and with fewer key/value heads than heads."""
    for size in (2, 3):
        held = [numbers(way.places(POSITIONS, i, size), torch.device("cpu")) for i in range(size)]
        if sorted(torch.cat(held).tolist()) != [*range(POSITIONS)]:
            yield f"{size} ranks: not every position lies on one of them, once"
            return
        if len({len(places) for places in held}) > 1:
            yield f"{size} ranks: they hold different numbers of positions"
        for dropout in (0.0, 0.25):
            alone = _attended(Core(Dropout(dropout)), [*range(POSITIONS)])
            many = run(size, lambda rank, p=dropout, n=size: _on_rank(way, Core(Dropout(p)), rank, n))
            for at, name in enumerate(
                ("the output", *(f"the gradient of {x}" for x in ("queries", "keys", "values")))
            ):
                whole = torch.zeros_like(alone[at])
                for places, parts in zip(held, many, strict=True):
                    whole[:, :, places] = parts[at]
                off = (whole - alone[at]).abs().max().item()
                if not off < NEAR:
                    under = "with dropout" if dropout else "without dropout"
                    yield f"{size} ranks, {under}: {name} is off by {off:.2g} from that of one device"


def _on_rank(way: ContextWay, core: Core, rank: int, size: int) -> list[Tensor]:
    group = Mesh(Shape(cp=size), rank, Recorder(rank), timedelta(seconds=60)).cp
    if way.by_heads:
        core.drop.places[1] = Places.whole(HEADS).dealt(rank, size)
    places = numbers(way.places(POSITIONS, rank, size), torch.device("cpu"))
    return _attended(way.bind(core, group, POSITIONS), places.tolist())


def _attended(core: torch.nn.Module, positions: list[int]) -> list[Tensor]:
    """The output at these positions, and the gradients of queries, keys and values there."""
    draw = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(ROWS, heads, POSITIONS, WIDTH, generator=draw, dtype=torch.float64)[:, :, positions]
        for heads in (HEADS, PAIRS, PAIRS, HEADS)
    ]
    *inputs, grad = parts
    noise = Noise(7, torch.arange(ROWS))
    out = core(*(x.requires_grad_() for x in inputs), noise)
    grads = torch.autograd.grad(out, inputs, grad)
    return [out.detach(), *grads]
