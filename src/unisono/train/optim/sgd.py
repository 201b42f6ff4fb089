"""Gradient descent with momentum (Sutskever et al., "On the importance of initialization and momentum", 2013)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Optimiser, Share, UpdateSizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Momentum(Optimiser):
    """A step along a velocity, to which each gradient adds; as torch has it, the decay is part of the gradient."""

    name: ClassVar[str] = "sgd"
    apart: ClassVar[bool] = True
    couples: ClassVar[bool] = True
    momentum: Share = Field(default=0.9, description="sgd: decay of the velocity")

    @property
    def kept(self) -> int:
        return 1 if self.momentum else 0

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from torch.optim import SGD

        return SGD([dict(group) for group in groups], lr=lr, momentum=self.momentum, fused=fused)

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        import torch

        return {"momentum_buffer": torch.zeros_like(parameter)} if self.momentum else {}

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        pull = update.decay * weight
        velocity, size = grad + pull, grad.abs() + pull.abs()
        after = {}
        if self.momentum:
            old = self.momentum * state["momentum_buffer"]
            velocity, size = velocity + old, size + old.abs()
            after["momentum_buffer"] = (velocity, error + update.rounding * size)
        off = update.lr * error + update.rounding * (weight.abs() + update.lr * size)
        return after | {"param": (weight - update.lr * velocity, off)}
