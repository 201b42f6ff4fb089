"""Codecs of a user's own: the largest elements alone, with what was left added the next time; and a two-shot cast."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from pydantic import Field

from unisono.codecs import Codec, Coder, Deal, Exchange, Gather, Memory, Sent
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor


class Largest(Codec):
    """The largest elements of each bucket, as values and places; what is left is added to the next gradient."""

    name = "largest"
    biased = True

    ratio: float = Field(0.25, gt=0, le=1, description="share of the elements that are sent")

    def kept(self, numel: int) -> int:
        return max(1, int(self.ratio * numel))

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        numel = sum(map(prod, shapes))
        return Work(
            (Call("dp", "all_gather", 2 * self.kept(numel) * itemsize * (dp - 1)),), kept=numel * itemsize
        )

    def bind(self) -> "LargestCoder":
        return LargestCoder(self)


class LargestCoder(Coder):
    keeps = ("left",)

    def __init__(self, member: Largest) -> None:
        self.member = member

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: Memory) -> Exchange:
        import torch

        numel = sum(shape.numel() for shape in shapes)
        body = grad[:numel]
        body.add_(memory["left"][:numel])
        places = body.abs().topk(self.member.kept(numel)).indices
        mine = torch.cat([body[places], places.to(body.dtype)])
        memory["left"][:numel] = body.index_fill(0, places, 0.0)
        total = torch.zeros_like(grad)
        for row in (yield Gather(mine)):
            values, where = row.chunk(2)
            total.index_add_(0, where.long(), values)
        return total


class Rounded(Codec):
    """Gradients as bf16: parts are dealt, added up in their own precision and gathered again."""

    name = "rounded"
    error = 0.01
    tells = True

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        part = -(-sum(map(prod, shapes)) // dp) * 2
        return Work((Call("dp", "all_to_all", part * (dp - 1)), Call("dp", "all_gather", part * (dp - 1))))

    def bind(self) -> "RoundedCoder":
        return RoundedCoder()


class RoundedCoder(Coder):
    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: Memory) -> Exchange:
        import torch

        code = grad.bfloat16()
        parts = yield Deal(code)
        total = parts.to(grad.dtype).sum(0)
        own = total.to(torch.bfloat16)

        def sent() -> "Tensor":
            mine = code.to(grad.dtype)
            mine.view(memory.replicas, -1)[memory.place] += own.to(grad.dtype) - total
            return mine

        yield Sent(sent)
        return (yield Gather(own)).reshape(-1).to(grad.dtype)


class Far(Rounded):
    """Declares that more may be missing than there was."""

    name = "far"
    error = 2.0
