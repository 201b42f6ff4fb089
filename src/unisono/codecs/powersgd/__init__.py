"""Gradients as two thin factors (Vogels et al., "PowerSGD: practical low-rank gradient compression", 2019)."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from pydantic import Field

from unisono.codecs import Codec
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from unisono.codecs.powersgd.live import PowerCoder


class PowerSGD(Codec):
    """Each matrix as a product of two thin ones, found by one round of power iteration a step.

    M [rows, columns] becomes P = M Q, summed over replicas and made orthonormal, then Q = Mᵀ P, summed; the sum is
    P Qᵀ, the projection of M's columns to those of P. Q is the next step's first guess, alike on all replicas. Vectors,
    and matrices that would not get smaller, are sent as they are. A tensor of more dims is a matrix with its first one
    as rows. What is not sent is lost, unless error feedback keeps it (`+ef`).
    """

    name = "powersgd"
    main = "r"
    linear = True
    biased = True
    matrix = True
    tells = True

    r: int = Field(4, ge=1, description="columns of the thin matrices")
    start: int = Field(
        0, ge=0, description="first step that is compressed; before it, gradients go as they are"
    )

    def rank(self, shape: Sequence[int]) -> int:
        """Columns of this parameter's factors; 0: it is sent as it is."""
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (0, 0)
        rank = min(self.r, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        first = second = flops = moved = 0
        for shape in shapes:
            if rank := self.rank(shape):
                first, second = first + shape[0] * rank, second + prod(shape[1:]) * rank
                flops += 6 * prod(shape) * rank
                moved += 3 * prod(shape)  # two products read the matrix, a third one writes it
            else:
                first, moved = first + prod(shape), moved + 4 * prod(shape)
        calls = (
            Call("dp", "all_reduce", 2 * numel * itemsize * (dp - 1) // dp)
            for numel in (first, second)
            if numel
        )
        return Work(tuple(calls), kept=second * itemsize, flops=flops, moved=moved * itemsize)

    def bind(self) -> "PowerCoder":
        from unisono.codecs.powersgd.live import PowerCoder

        return PowerCoder(self)
