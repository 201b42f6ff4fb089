"""Which parameters of a bucket a codec encodes, and which travel as they are beside them, in one exchange.

Norms and biases are few numbers that matter much, and small tensors gain nothing: both cost less to send than to round.
A codec that is a `Selective` one says how the rest is encoded; the option `dense` then is the user's.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.codecs import BucketMemory, Codec, Coder, Exchange, Sent, Sum
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor

Shapes = Sequence[tuple[int, ...]]


class Selective(Codec):
    """A codec that lets small parameters, and those of one dim, travel as they are.

    align: elements at whose multiples each encoded parameter begins, with zeros before it, so that no block of a codec
    holds parts of two; the coder then is given padded shapes of one dim.
    """

    align: ClassVar[int] = 1

    dense: int = Field(
        default=256,
        ge=0,
        description="parameters of fewer elements, or of one dim, travel as they are; 0: none does",
    )

    @abstractmethod
    def coded(self, shapes: Shapes, itemsize: int, dp: int) -> Work:
        """As `work`, of parameters that are encoded; there is at least one."""

    @abstractmethod
    def coder(self) -> Coder:
        """The live codec for parameters that are encoded."""

    def spared(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape travels as it is."""
        return self.dense > 0 and (len(shape) < 2 or prod(shape) < self.dense)

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (-(-prod(shape) // self.align) * self.align,) if self.align > 1 else tuple(shape)

    def work(self, shapes: Shapes, itemsize: int, dp: int) -> Work:
        nbytes = sum(prod(shape) for shape in shapes if self.spared(shape)) * itemsize
        calls = (Call("dp", "all_reduce", 2 * nbytes * (dp - 1) // dp),) if nbytes else ()
        rest = [self.padded(shape) for shape in shapes if not self.spared(shape)]
        if not rest:
            return Work(calls)
        coded = self.coded(rest, itemsize, dp)
        return replace(coded, calls=(*calls, *coded.calls))

    def bind(self) -> "SelectiveCoder":
        return SelectiveCoder(self, self.coder())


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the parameters of a bucket lie: in it, and in what is encoded. coded, spared: numbers of those that are
    encoded, and of those that are not. padded: of each encoded one its shape there. length: of all that is encoded."""

    shapes: Sequence[Sequence[int]]
    coded: list[int]
    spared: list[int]
    padded: list[tuple[int, ...]]
    length: int

    @property
    def straight(self) -> bool:
        """Whether all is encoded as it lies in the bucket."""
        return not self.spared and all(
            prod(self.padded[at]) == prod(self.shapes[i]) for at, i in enumerate(self.coded)
        )

    def of(self, flat: "Tensor", numbers: Sequence[int]) -> "list[Tensor]":
        """Views of some parameters in something as long as the bucket."""
        ends = list(accumulate(map(prod, self.shapes)))
        return [flat[ends[i] - prod(self.shapes[i]) : ends[i]] for i in numbers]

    def inside(self, packed: "Tensor") -> "list[Tensor]":
        """Views of the encoded parameters in something as long as what is encoded."""
        ends = list(accumulate(map(prod, self.padded)))
        starts = [0, *ends[:-1]]
        return [
            packed[start : start + prod(self.shapes[i])] for start, i in zip(starts, self.coded, strict=True)
        ]

    def packed(self, flat: "Tensor") -> "Tensor":
        """What is encoded of `flat`, with zeros between."""
        import torch

        line = torch.zeros(self.length, dtype=flat.dtype, device=flat.device)
        torch._foreach_copy_(self.inside(line), self.of(flat, self.coded))
        return line

    def whole(self, decoded: "Tensor", beside: "Tensor", like: "Tensor") -> "Tensor":
        """As long as `like`: what was decoded, perhaps without zeros at its end, and what travelled as it is."""
        import torch

        out = torch.zeros_like(like)
        if len(decoded) < self.length:
            decoded = torch.cat([decoded, decoded.new_zeros(self.length - len(decoded))])
        torch._foreach_copy_(self.of(out, self.coded), self.inside(decoded))
        if self.spared:
            sizes = [prod(self.shapes[i]) for i in self.spared]
            torch._foreach_copy_(self.of(out, self.spared), list(beside.split(sizes)))
        return out


def parting(member: Selective, shapes: Sequence[Sequence[int]], replicas: int) -> Parting:
    """Of one bucket; what is encoded can be dealt evenly."""
    coded = [i for i, shape in enumerate(shapes) if not member.spared(shape)]
    spared = [i for i, shape in enumerate(shapes) if member.spared(shape)]
    padded = [member.padded(shapes[i]) for i in coded]
    return Parting(shapes, coded, spared, padded, -(-sum(map(prod, padded)) // replicas) * replicas)


class SelectiveCoder(Coder):
    """Packs what is to be encoded, and adds up the rest beside the first request of the coder inside."""

    def __init__(self, member: Selective, inner: Coder) -> None:
        self.member, self.inner = member, inner
        self.keeps, self.counts, self.cap = inner.keeps, inner.counts, inner.cap

    def alike(self, name: str, like: "Tensor") -> "dict[str, Tensor]":
        return {} if self.member.spared(like.shape) else dict(self.inner.alike(name, like))

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        parts = parting(self.member, shapes, memory.replicas)
        if not parts.coded:
            yield Sent(lambda: grad)
            return (yield Sum(grad))
        sizes = [type(shapes[0])(shape) for shape in parts.padded]
        if parts.straight:
            return (yield from self.inner.exchange(grad, sizes, memory))
        return (yield from self._apart(grad, sizes, parts, memory))

    def _apart(
        self, grad: "Tensor", sizes: "Sequence[Size]", parts: Parting, memory: BucketMemory
    ) -> Exchange:
        import torch

        mine = parts.of(grad, parts.spared)
        small = torch.cat(mine) if mine else grad[:0].clone()
        before = small.clone()
        kept = {key: parts.packed(memory[key]) for key in self.inner.keeps}
        alike = [memory.alike[i] for i in parts.coded] if memory.alike else ()
        names = tuple(memory.names[i] for i in parts.coded) if memory.names else ()
        about = replace(memory, kept=kept, alike=alike, names=names)
        inner = self.inner.exchange(parts.packed(grad), sizes, about)
        answer, waiting = None, bool(parts.spared)
        while True:
            try:
                request = inner.send(answer)
            except StopIteration as end:
                total = end.value
                break
            if isinstance(request, Sent):
                decoded = request.decoded
                answer = yield Sent(lambda decoded=decoded: parts.whole(decoded(), before, grad))
            elif waiting:
                waiting, several = False, isinstance(request, tuple)
                small, *answers = yield (Sum(small), *(request if isinstance(request, tuple) else (request,)))
                answer = tuple(answers) if several else answers[0]
            else:
                answer = yield request
        for key, x in kept.items():
            torch._foreach_copy_(parts.of(memory[key], parts.coded), parts.inside(x))
        return parts.whole(total, small, grad)
