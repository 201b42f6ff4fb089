"""What `shampoo`, `soap` and `kfac` have in common: means of products of both sides of a matrix, kept by its owner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Count, MatrixWork, Natural, Share, UpdateSizes
from unisono_contrib.train.optim._matrices import MatrixOptimiser

if TYPE_CHECKING:
    from torch import Tensor

EIGEN_FLOPS = (
    9.0  # n³ of them for eigenvalues and vectors of n rows (Golub & Van Loan, "Matrix computations", 8.3)
)


class Curved(MatrixOptimiser):
    """Steps matrices by the curvature that both of their sides have seen. A side longer than `curvature_edge` is left
    as it is, since decomposing it is cubic in its length."""

    with_owner: ClassVar[bool] = True
    curvature_decay: Share = Field(
        default=0.95, description="shampoo, soap, kfac: decay of the means of products"
    )
    curvature_interval: Count = Field(
        default=10, description="shampoo, soap, kfac: updates from one decomposition to the next"
    )
    curvature_edge: Natural = Field(
        default=8192, description="shampoo, soap, kfac: edges that are longer have no mean"
    )

    turns: ClassVar[int] = 1  # how often an update multiplies a matrix from both sides

    def edges(self, shape: Sequence[int]) -> dict[str, int]:
        """The length of each side that has a mean."""
        both = zip(("left", "right"), shape, strict=True)
        return {side: n for side, n in both if n <= self.curvature_edge}

    def sides(self, parameter: "Tensor") -> "dict[str, Tensor]":
        """Zeros for each mean that there is."""
        return {side: parameter.new_zeros(n, n) for side, n in self.edges(parameter.shape).items()}

    def matrix_work(self, shape: tuple[int, ...]) -> MatrixWork:
        """Each update multiplies a side of n rows with itself, and turns the matrix by it: 2 n · elements each."""
        edges = self.edges(shape).values()
        grams = 0 if self.observed else 1  # what is observed, is multiplied by whoever observes it
        products = (grams + self.turns) * sum(2.0 * n * prod(shape) for n in edges)
        decomposed = EIGEN_FLOPS * sum(float(n) ** 3 for n in edges) / self.curvature_interval
        return replace(super().matrix_work(shape), products=products, decompositions=decomposed)

    def means(
        self, state: "Mapping[str, Tensor]", grad: "Tensor", error: "Tensor", rounding: float
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        """The law of both means. A product of n terms is off by sqrt(n) roundings of its absolute size, usually."""
        keep, law = self.curvature_decay, {}
        for side, x, off in (("left", grad, error), ("right", grad.mT, error.mT)):
            if side in state:
                size, cross = x.abs() @ x.abs().mT, x.abs() @ off.mT
                new = keep * state[side] + (1 - keep) * x @ x.mT
                apart = (1 - keep) * (cross + cross.mT + off @ off.mT + rounding * sqrt(x.shape[1]) * size)
                law[side] = new, apart + rounding * (new.abs() + state[side].abs())
        return law

    def between(
        self,
        roots: "Roots",
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        law: "dict[str, tuple[Tensor, Tensor]]",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        """`law`, which has the momentum and both means after the update, with their inverse roots and the parameter.

        Errors of the direction are bounded in the Frobenius norm, from which no element differs by more."""
        import torch

        from unisono_contrib.train.optim._curved_steps import inverse_root_within, rotated, to_rms

        (momentum, off), rounding, out = law["momentum_buffer"], update.rounding, dict(law)
        sides: list[Tensor | None] = []
        length, most = float(momentum.norm()), float(momentum.norm() + off.norm())
        for side in ("left", "right"):
            if side not in state:
                sides.append(None)
                continue
            root, apart = state[f"{side}_root"], 0.0
            if update.step % self.curvature_interval == 0:
                root, apart = inverse_root_within(*law[side], roots.power, roots.damping, rounding)
            out[f"{side}_root"] = root, torch.full_like(root, apart)
            size = float(torch.linalg.matrix_norm(root, 2))
            sides.append(root)
            length, most = length * size, most * (size + apart) * (1 + rounding * len(root) ** 0.5)
        move, apart = rotated(momentum, *sides), most - length + rounding * length
        if roots.rms:
            short = float(move.norm())
            move, relative = to_rms(move), min(2.0, 2 * apart / short) if short else 2.0
            apart = relative * float(move.norm())
        left = weight * (1 - update.lr * update.decay)
        moved = update.lr * apart + rounding * (weight.abs() + update.lr * move.abs())
        return {**out, "param": (left - update.lr * move, moved)}


@dataclass(frozen=True, slots=True)
class Roots:
    """How a momentum is multiplied by inverse roots of both means. damping: of the mean eigenvalue. rms: whether the
    result is brought to the length of an AdamW step."""

    power: float
    damping: float
    rms: bool


def counted(step: int) -> "tuple[Tensor, Tensor]":
    """The law of the counter: one more than `step`."""
    import torch

    return torch.full((), float(step + 1), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
