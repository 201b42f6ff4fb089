"""Optimisers of matrices inside a network; all other parameters are stepped by AdamW.

A matrix' step depends on the whole of it. Where ranks hold parts or copies, one of them computes for all (`owners.py`).
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, ClassVar

from pydantic import Field

from unisono.plan.blocks import away_in, ranges_of
from unisono.spec.errors import Problem
from unisono.spec.training import MatrixWork, Optimiser, Positive, Share
from unisono.train.optim.adamw import AdamW

BLOCKS = "blocks."
"""Names of parameters between a model's embedding and its head begin so."""


def product_cost(shape: Sequence[int]) -> float:
    """Of a matrix' direction, to compare matrices: as products of it with its own gram matrix."""
    return float(prod(shape) * min(shape))


def decomposition_cost(shape: Sequence[int]) -> float:
    """Of a matrix' direction, to compare matrices: as decompositions of both sides, cubic in an edge."""
    return float(sum(edge**3 for edge in shape))


class MatrixOptimiser(Optimiser):
    """Steps matrices of blocks; embeddings, heads, vectors and stacks of matrices are stepped by AdamW."""

    whole: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    by_name: ClassVar[bool] = True
    squares: ClassVar[bool] = True
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), description="of its AdamW: decay of the two moments"
    )
    eps: Positive = Field(default=1e-8, description="of its AdamW: added to the root of the squares")

    @property
    def most_kept(self) -> int:
        return 2

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Optimiser:
        inside = name.startswith(BLOCKS) and len(shape) == 2
        return self if inside else AdamW(betas=self.betas, eps=self.eps)

    def matrix_work(self, shape: tuple[int, ...]) -> MatrixWork:
        if not self.with_owner:
            return MatrixWork(self.kept * prod(shape), product_cost(shape))
        import torch

        state = self.state(torch.empty(shape, device="meta"))
        return MatrixWork(sum(x.numel() for x in state.values() if x.dim()), decomposition_cost(shape))

    def problems(self, plan: Any, model: Any) -> Iterator[Problem]:
        if plan.arithmetic.stochastic:
            what = f"optimizer={self.name} steps masters in float32, and precision={plan.text('precision')} has none"
            yield Problem("P28", what, "plan.precision, train.optimizer", "precision=bf16")
        cut = [axis for axis in ("tp", "shard") if getattr(plan, axis) > 1]
        texts = (plan.offload, *(part.says("offload") for part in ranges_of(plan.blocks)))
        if (cut or self.with_owner) and any(away_in(text).optimizer for text in texts if text):
            why = f"{cut[0]}={getattr(plan, cut[0])} cuts matrices" if cut else "state lies with owners"
            what = f"optimizer={self.name} steps all matrices at once where {why}, and offload brings state in parts"
            yield Problem("P28", what, "plan.offload, train.optimizer", "offload=none")
