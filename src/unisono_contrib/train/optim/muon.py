"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

A matrix' step is U Vᵀ of its momentum U S Vᵀ, roughly: some iterations of Newton and Schulz bring all singular values
near 1. It is scaled by 0.2 · sqrt(longer edge), which gives it the root mean square of an AdamW step, so that both can
have one learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982). It is meant for matrices inside a network;
all other parameters are stepped by AdamW.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.spec.training import Count, MatrixWork, Share, UpdateSizes
from unisono_contrib.train.optim._matrices import MatrixOptimiser

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Muon(MatrixOptimiser):
    """Matrices of blocks move by their orthogonal momentum; all other parameters, such as embeddings, by AdamW."""

    name: ClassVar[str] = "muon"
    muon_momentum: Share = Field(default=0.95, description="muon: decay of the momentum, which is Nesterov's")
    muon_iterations: Count = Field(default=5, description="muon: iterations of Newton and Schulz")
    muon_bf16: bool = Field(
        default=False,
        description="muon: iterate in bf16, as torch.optim.Muon does; faster on GPUs, less exact",
    )

    @property
    def kept(self) -> int:
        return 1

    def matrix_work(self, shape: tuple[int, ...]) -> MatrixWork:
        """An iteration has three products: of the matrix with itself, of that with itself, and of both."""
        short, long = min(shape), max(shape)
        products = self.muon_iterations * 2.0 * short * short * (2 * long + short)
        return replace(super().matrix_work(shape), products=products, narrow=self.muon_bf16)

    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        from unisono_contrib.train.optim._muon_steps import MuonSteps

        plain = [dict(group) for group in groups]
        return MuonSteps(plain, lr, self.muon_momentum, self.muon_iterations, self.muon_bf16)

    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        import torch

        return {"momentum_buffer": torch.zeros_like(parameter)}

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        from unisono_contrib.train.optim._muon_steps import orthogonal_within, scale_of

        keep, rounding = self.muon_momentum, update.rounding
        old = state["momentum_buffer"]
        momentum, size = keep * old + (1 - keep) * grad, keep * old.abs() + (1 - keep) * grad.abs()
        off = (1 - keep) * error + rounding * size
        ahead = keep * momentum + (1 - keep) * grad
        ahead_off = keep * off + (1 - keep) * error + rounding * (keep * size + (1 - keep) * grad.abs())
        digits = max(rounding, 2.0**-8) if self.muon_bf16 else rounding
        move, move_off = orthogonal_within(ahead, ahead_off, self.muon_iterations, digits)
        rate = update.lr * scale_of(weight.shape)
        left = weight * (1 - update.lr * update.decay)
        moved = rate * move_off + rounding * (weight.abs() + rate * move.abs())
        return {"momentum_buffer": (momentum, off), "param": (left - rate * move, moved)}
