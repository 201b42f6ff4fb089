"""Two bits an element: zero, or one size for a whole parameter, up or down (Wen et al., "TernGrad", 2017).

All replicas share the sizes, so what they send adds up to small whole numbers: the sum is handed out as such, and is
rounded no second time. A sum of bytes on an all-reduce would send more up to any number of replicas.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.codecs import BucketMemory, Coder, Deal, Exchange, Gather, Sent
from unisono.codecs._dense import Selective
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor, dtype

    from unisono.codecs._noise import NoiseTable

WIDE = 64
"""Elements at whose multiples a part ends: codes are read as words of eight bytes."""
CODE = 2
"""Bits of what one replica sends of an element: 0, 1 or 2, of which 1 is zero."""
PIECE = 1 << 17  # elements that are drawn together, so that they stay in a core's cache


class Ternary(Selective):
    """Zero, or up or down by a size that is drawn so that the mean is right: 2 bits, sizes shared by the replicas."""

    name = "ternary"
    main = "clip"
    error: ClassVar[float] = 2.0
    tells: ClassVar[bool] = True

    clip: float = Field(
        default=2.5, gt=0, description="the size is at most so many times the parameter's root mean square"
    )

    @property
    def contracts(self) -> bool:
        """A draw of x is off by |x| (size - |x|) in the mean square, a parameter so by at most clip - 1 of its own."""
        return self.clip < 2.0

    def lost(self, dp: int) -> float:
        """What a replica sends of an element is off by less than its largest element, which is taken to be sqrt(dp)
        times smaller than the largest of the sum. With a margin of two, as `rounded_twice` has."""
        return 2.0 * dp**0.5

    def part(self, numel: int, dp: int) -> int:
        """Elements that one replica adds up."""
        return -(-numel // (WIDE * dp)) * WIDE

    def total_bits(self, dp: int) -> int:
        """Of a sum of codes, which is up to 2 dp."""
        return next(bits for bits in (2, 4, 8, 16, 32) if 2 * dp < 1 << bits)

    def coded(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        numel = sum(map(prod, shapes))
        part, bits = self.part(numel, dp), self.total_bits(dp)
        sizes, codes, totals = 4 * len(shapes), part * CODE // 8, part * bits // 8
        ops = (("all_gather", sizes), ("all_to_all", codes), ("all_gather", totals))
        calls = tuple(Call("dp", op, nbytes * (dp - 1)) for op, nbytes in ops)
        # Sizes are told and codes drawn from the gradient, which the sum is written to.
        return Work(calls, flops=10 * numel, moved=round(numel * (3 * itemsize + (3 * CODE + bits) / 8)))

    def coder(self) -> "TernaryCoder":
        return TernaryCoder(self)


class TernaryCoder(Coder):
    """Agrees on sizes, deals codes, adds them up as whole numbers and hands these out."""

    counts = True
    cap = 1 << 20  # as codecs by blocks: work of the processor before, between and behind its rounds

    def __init__(self, member: Ternary) -> None:
        self.member = member
        self._noise: NoiseTable | None = None

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        import torch

        from unisono.codecs._noise import NoiseTable
        from unisono.codecs._packing import pack, unpack
        from unisono.codecs._sparse import spans

        dp, numels = memory.replicas, [shape.numel() for shape in shapes]
        part = self.member.part(sum(numels), dp)
        own_sizes = torch.stack([size_of(x, self.member.clip) for _, x in spans(grad, numels)])
        sizes = (yield Gather(own_sizes)).amax(0)  # one that is not a number is larger than any
        small = torch.ones(dp * part, dtype=torch.uint8, device=grad.device)
        parameters = zip(spans(grad, numels), sizes.unbind(), memory.names, strict=True)
        for (begin, x), size, name in parameters:
            if self._noise is None:
                self._noise = NoiseTable(memory.seed, PIECE, grad.device)
            drawn = small[begin : begin + len(x)]
            draw(x, size, drawn, self._noise, memory.step, name, memory.place)
        codes = torch.empty(dp, part * CODE // 8, dtype=torch.uint8, device=grad.device)
        pack(small.view(dp, part), codes, CODE)

        def valued(flat: "Tensor", zero: int) -> "Tensor":
            """flat [n] of whole numbers, of which one means nothing, as what they stand for; in place."""
            flat.sub_(zero)
            for (_, x), size in zip(spans(flat, numels), sizes.unbind(), strict=True):
                x.mul_(size)
            return flat

        yield Sent(lambda: valued(small[: len(grad)].to(grad.dtype), 1))
        parts = yield Deal(codes.view(-1))
        total = _added(parts, part, self.member.total_bits(dp))
        everybody = yield Gather(total)
        out = grad.new_empty(dp, part)
        bits = self.member.total_bits(dp)
        if bits <= 8:
            unpack(everybody, out, bits)
        else:
            out.copy_(everybody.view(_wide(bits)))
        values = valued(out.view(-1)[: len(grad)], dp)
        return (
            values
            if len(values) == len(grad)
            else torch.cat([values, values.new_zeros(len(grad) - len(values))])
        )


def draw(x: "Tensor", size: "Tensor", codes: "Tensor", noise: "NoiseTable", *what: int | str) -> None:
    """x [n] → codes [n] uint8: up or down as often as x is parts of `size`, else zero. what: by which it is drawn."""
    import torch

    inverse = torch.where(size > 0, 1.0 / size, 0.0)  # of what is not a number, all codes are zero
    for at in range(0, len(x), PIECE):
        piece = slice(at, at + PIECE)
        share = x[piece].float().mul(inverse)
        missed = ~(share.abs() > noise.drawn(len(share), *what, at))  # as is what is not a number
        codes[piece].copy_(share.sign_().masked_fill_(missed, 0.0).add_(1.0))


def size_of(x: "Tensor", clip: float) -> "Tensor":
    """The largest magnitude of x [n], at most `clip` times its root mean square: no dims, in fp32. Not a number where
    some element is not finite."""
    import torch

    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    most, root = x.abs().amax(), torch.linalg.vector_norm(x) / x.numel() ** 0.5
    return torch.where(torch.isfinite(most), torch.minimum(most, clip * root), torch.nan).float()


def _added(parts: "Tensor", part: int, bits: int) -> "Tensor":
    """[replicas, bytes] of codes → [bytes] of their sums."""
    import torch

    from unisono.codecs._packing import pack, unpacked

    total = torch.zeros(1, part, dtype=_wide(bits), device=parts.device)
    for codes in parts:
        total.add_(unpacked(codes[None], CODE))
    if bits > 8:
        return total.view(-1).view(torch.uint8)
    bits_out = torch.empty(1, part * bits // 8, dtype=torch.uint8, device=parts.device)
    pack(total, bits_out, bits)
    return bits_out.view(-1)


def _wide(bits: int) -> "dtype":
    import torch

    return {16: torch.int16, 32: torch.int32}.get(bits, torch.uint8)
