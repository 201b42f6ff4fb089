"""Cut a model into pipeline stages of about equal cost."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from unisono.models.noise import Noise


def balance(costs: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """Consecutive blocks per stage so that the dearest stage is as cheap as can be; `first` and `last` are what
    stem and head add to the outer stages. Every stage gets at least one block.

    Raises ValueError if there are fewer blocks than stages.
    """
    n = len(costs)
    if stages > n:
        raise ValueError(f"{n} blocks cannot make {stages} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def price(lo: int, hi: int) -> float:
        return total[hi] - total[lo] + first * (lo == 0) + last * (hi == n)

    best = {(0, 0): (0.0, 0)}  # (stages made, blocks used) → (dearest so far, where the last stage began)
    for made in range(1, stages + 1):
        for hi in range(made, n - (stages - made) + 1):
            options = [
                (max(best[made - 1, lo][0], price(lo, hi)), lo)
                for lo in range(made - 1, hi)
                if (made - 1, lo) in best
            ]
            best[made, hi] = min(options, key=lambda option: (option[0], -option[1]))
    edges = [n]
    for made in range(stages, 0, -1):
        edges.append(best[made, edges[-1]][1])
    edges.reverse()
    return [range(lo, hi) for lo, hi in pairwise(edges)]


def matrix_cost(module: nn.Module) -> float:
    """Multiplications per position, by the number of matrix elements; tables that are only looked up are free."""
    return float(sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d))))


class Stage(nn.Module):
    """Some consecutive blocks under their logical names, with the stem if first and the head if last."""

    def __init__(self, model: nn.Module, blocks: range, index: int, count: int) -> None:
        super().__init__()
        self.index, self.count = index, count
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.stem = model.stem
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})  # type: ignore[index]
        if self.last:
            self.head = model.head
        self.ties: tuple[tuple[str, str], ...] = model.anatomy.ties  # type: ignore[union-attr]
        self.loss: Callable[[Tensor, Tensor], Tensor] = model.loss  # type: ignore[assignment]

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """Inputs or the previous stage's activations → activations, or logits on the last stage."""
        if self.first:
            x = self.stem(x, noise)  # pyright: ignore[reportCallIssue]
        for block in self.blocks.values():
            x = block(x, noise)
        return self.head(x) if self.last else x  # pyright: ignore[reportCallIssue]


def cut(model: nn.Module, stages: int) -> list[range]:
    """The blocks of each stage, balanced by cost."""
    costs = [matrix_cost(block) for block in model.blocks]  # type: ignore[union-attr]
    return balance(costs, matrix_cost(model.stem), matrix_cost(model.head), stages)  # type: ignore[arg-type]


@torch.no_grad()
def boundary_shapes(model: nn.Module, cuts: Sequence[range], inputs: Tensor) -> list[tuple[int, ...]]:
    """Shape of what stage s sends to stage s + 1, found by a forward pass on the meta device.

    inputs: a meta tensor of one micro-batch.
    """
    shapes = []
    x = model.stem(inputs, None)  # type: ignore[operator]
    for blocks in cuts[:-1]:
        for i in blocks:
            x = model.blocks[i](x, None)  # type: ignore[index,operator]
        shapes.append(tuple(x.shape))
    return shapes
