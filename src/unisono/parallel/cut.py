"""Cut a model into pipeline stages of about equal cost."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unisono.models.noise import Noise
from unisono.programs.balance import balance


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
