"""Several optimisers that act as one, each with parameters of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class SeveralOptimizers(Optimizer):
    """Its groups are those of the parts, and its state is theirs: what is changed in one is changed in the other."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {"lr": 0.0})
        self.parts = tuple(parts)
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for part in self.parts:
            part.step()
