"""Elements by lot, the same on all replicas (Stich et al., "Sparsified SGD with memory", 2018)."""

from collections.abc import Sequence
from math import ceil, prod
from typing import TYPE_CHECKING

from pydantic import Field

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs._parcel import Sparse
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor, device


class RandomK(Sparse):
    """Elements by lot, the same ones on all replicas, so that they are added up without their places.

    Each parameter is cut into as many stretches as elements are sent, of one length but for one element; of each
    stretch one is drawn from the run's seed, the step and the number of elements. What is not sent is lost, unless
    error feedback keeps it (`+ef`). With `unbiased` what is sent counts for its whole stretch: the mean over the lots
    is the gradient, and the error 1/ratio times as large as what was not sent; then there is nothing to keep.
    """

    name = "randomk"
    main = "ratio"
    linear = True

    unbiased: bool = Field(False, description="multiply what is sent, so that its mean is the gradient")

    @property
    def error(self) -> float:  # type: ignore[override]
        return max(1.0, ceil(1 / self.ratio) - 1.0) if self.unbiased else 1.0

    @property
    def contracts(self) -> bool:
        """What counts for a stretch of L elements is off by L - 1 times its square in the mean."""
        return not self.unbiased or self.ratio == 1

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        sent = sum(map(self.kept, shapes)) * itemsize
        moved = 2 * sum(map(prod, shapes)) * itemsize  # whether all is finite, and zeros before the sum
        return Work((Call("dp", "all_reduce", 2 * (sent + itemsize) * (dp - 1) // dp),), moved=moved)

    def bind(self) -> "RandomKCoder":
        return RandomKCoder(self)


class RandomKCoder(Coder):
    """The sum of what the lot falls on."""

    counts = True

    def __init__(self, member: RandomK) -> None:
        self.member = member

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        import torch

        from unisono.codecs._noise import lot
        from unisono.codecs._sparse import finite_mark, spans

        parts, lengths = [], []
        begins = (begin for begin, _ in spans(grad, [shape.numel() for shape in shapes]))
        for begin, shape, name in zip(begins, shapes, memory.names, strict=True):
            number = lot(memory.seed, memory.step, name)
            places, stretches = drawn(shape.numel(), self.member.kept(shape), number, grad.device)
            parts.append(places + begin)
            lengths.append(stretches)
        places, values = torch.cat(parts), grad[torch.cat(parts)]
        if self.member.unbiased:
            values.mul_(torch.cat(lengths))
        sent = torch.cat([values, finite_mark(grad)])
        yield Sent(lambda: torch.zeros_like(grad).index_copy_(0, places, values))
        total = yield Sum(sent)
        grad.zero_()
        return grad.index_copy_(0, places, total[:-1]).add_(total[-1])


def drawn(numel: int, kept: int, number: int, place: "device") -> "tuple[Tensor, Tensor]":
    """(places [kept], ascending; length [kept] of the stretch that each was drawn from). number: of the draw."""
    import torch

    ends = torch.arange(kept + 1) * numel // max(1, kept)
    lengths = ends.diff()
    draws = torch.Generator().manual_seed(number)
    at = torch.rand(kept, generator=draws, dtype=torch.float64).mul_(lengths).long()
    return (ends[:-1] + at.minimum(lengths - 1)).to(place), lengths.to(place)
