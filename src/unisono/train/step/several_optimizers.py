"""Several optimisers that act as one, each with parameters of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.parallel.offload.streaming import passes_of


class SeveralOptimizers(Optimizer):
    """Its groups are those of the parts, and its state is theirs: what is changed in one is changed in the other.

    passes: over all parameters in a step; each part makes the first ones. number: see `passes_of`."""

    number: int | None = None

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {"lr": 0.0})
        self.parts = tuple(parts)
        for part in parts:
            self.state.update(part.state)
            part.state = self.state
        self.passes = max(map(passes_of, parts))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for number in range(self.passes) if self.number is None else (self.number,):
            for part in self.parts:
                if number < passes_of(part):
                    part.number = number  # type: ignore[attr-defined]
                    part.step()
