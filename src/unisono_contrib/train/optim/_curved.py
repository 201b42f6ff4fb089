"""What `shampoo` and `soap` have in common: means of G Gᵀ and Gᵀ G of a matrix' gradients G, kept by its owner."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.spec.training import Count, MatrixWork, Natural, Share
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
        default=0.95, description="shampoo, soap: decay of the means of gradients' products"
    )
    curvature_interval: Count = Field(
        default=10, description="shampoo, soap: updates from one decomposition to the next"
    )
    curvature_edge: Natural = Field(
        default=8192, description="shampoo, soap: edges that are longer have no mean"
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
        products = (1 + self.turns) * sum(2.0 * n * prod(shape) for n in edges)
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


def counted(step: int) -> "tuple[Tensor, Tensor]":
    """The law of the counter: one more than `step`."""
    import torch

    return torch.full((), float(step + 1), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
