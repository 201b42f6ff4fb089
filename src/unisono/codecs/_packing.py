"""BlockCodec of numbers as bytes, and the two rounds in which they are added up; see `_blocks`.

Everything goes chunk by chunk, so that what one operation wrote the next one finds in the core's cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Deal, Exchange, Gather, Sent
from unisono.codecs._noise import NoiseTable

CHUNK = (
    1 << 19
)  # elements: few operations, each some microseconds of Python, on what the cores share of cache holds
UP = 1.0 + 2.0**-7  # a scale in bf16 that was multiplied by this is not below what it was


class BlockLayout(Protocol):
    """How a bucket lies in blocks: see `BlockCodec`, which is one."""

    @property
    def block(self) -> int: ...

    def blocks(self, numel: int, dp: int) -> int: ...

    def part_bytes(self, blocks: int) -> int: ...

    def scale_bytes(self, blocks: int) -> int: ...


class Packer(ABC):
    """Encodes rows of fp32 as rows of bytes with a scale each. draws: it needs noise."""

    draws: bool = False

    @abstractmethod
    def encode(self, x: Tensor, codes: Tensor, scales: Tensor, work: Tensor, noise: Tensor | None) -> None:
        """x [rows, block] fp32 → codes [rows, bytes] uint8, scales [rows] bf16. work [rows, block] fp32 is scratch.
        noise [rows, block]: uniform in [0, 1)."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """codes [rows, bytes], scales [rows] → out [rows, block] fp32."""


class LevelPacker(Packer):
    """Integers from -levels to levels in bits of their own; the largest magnitude of a block is the last level. draws:
    up or down at random, with the right mean; else to the nearest."""

    def __init__(self, levels: int, bits: int, draws: bool = False) -> None:
        self.levels, self.bits, self.draws = levels, bits, draws

    def encode(self, x: Tensor, codes: Tensor, scales: Tensor, work: Tensor, noise: Tensor | None) -> None:
        scaled_to(x, self.levels, scales, work)
        if noise is None:
            work.round_()
        else:
            work.add_(noise).floor_()
        # Conversion to bytes with a sign is three times as fast as to those without.
        if self.bits == 8:
            codes.view(torch.int8).copy_(work)
        else:
            small = work.to(torch.int8).add_(self.levels).view(torch.uint8)
            pack(small.view(1, -1), codes.view(1, -1), self.bits)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            small = codes.view(torch.int8)
        else:
            small = unpacked(codes.view(1, -1), self.bits).view(torch.int8).sub_(self.levels)
        out.copy_(small.view_as(out)).mul_(scales.float()[:, None])


class SignPacker(Packer):
    """One bit an element, and the mean magnitude of the block."""

    def encode(self, x: Tensor, codes: Tensor, scales: Tensor, work: Tensor, noise: Tensor | None) -> None:
        torch.abs(x, out=work)
        scales.copy_(work.mean(1))
        # A comparison whose answers are fp32 and then made bytes is twice as fast as one whose answers are bytes.
        negative = torch.lt(x, 0.0, out=work).to(torch.int8).view(torch.uint8)
        pack(negative.view(1, -1), codes.view(1, -1), 1)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        signs = unpacked(codes.view(1, -1), 1).view(torch.int8).mul_(-2).add_(1)
        out.copy_(signs.view_as(out)).mul_(scales.float()[:, None])


class FloatPacker(Packer):
    """Floating point of eight bits, of which the largest magnitude of a block is the largest number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.most = dtype, torch.finfo(dtype).max

    def encode(self, x: Tensor, codes: Tensor, scales: Tensor, work: Tensor, noise: Tensor | None) -> None:
        scaled_to(x, self.most, scales, work)
        codes.view(self.dtype).copy_(work)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(self.dtype)).mul_(scales.float()[:, None])


def scaled_to(x: Tensor, most: float, scales: Tensor, work: Tensor) -> None:
    """work [rows, block]: x divided by its row's scale, so that no magnitude is above `most`. Writes scales [rows]."""
    torch.abs(x, out=work)
    scales.copy_(work.amax(1).mul_(UP / most))
    torch.mul(x, inverse(scales)[:, None], out=work)


def inverse(scales: Tensor) -> Tensor:
    """1 / scale in fp32, and a finite number of a block of zeros."""
    return scales.float().reciprocal_().clamp_max_(torch.finfo(torch.float32).max)


def pack(small: Tensor, codes: Tensor, bits: int) -> None:
    """small [rows, n] uint8, each below 2^bits → codes [rows, n · bits / 8]. Byte i holds elements i, i + n · bits / 8
    and so on. The upper half of what is there moves into the upper bits of the lower half until all bits are taken;
    eight bytes are shifted at once."""
    rows, shift = len(small), 8
    packed = small.view(torch.int64)
    while shift > bits:
        shift //= 2
        halves = packed.view(rows, 2, -1)
        packed = (halves[:, 1] << shift).bitwise_or_(halves[:, 0])
    codes.copy_(packed.view(torch.uint8))


def unpack(codes: Tensor, out: Tensor, bits: int) -> None:
    """codes [rows, n · bits / 8] uint8 → out [rows, n], in its dtype."""
    out.copy_(unpacked(codes, bits))


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """codes [rows, n · bits / 8] uint8 → [rows, n] uint8: what `pack` was given."""
    rows, shift, small = len(codes), bits, codes.view(torch.int64)
    while shift < 8:
        halves = small.new_empty(rows, 2, small.shape[1])
        halves[:, 0] = small
        torch.bitwise_right_shift(small, shift, out=halves[:, 1])
        lower = 0xFF // ((1 << shift) + 1)  # of each 2 · shift bits the lower half: 0x55, 0x33, 0x0F
        small = halves.view(rows, -1).bitwise_and_(lower * 0x0101010101010101)
        shift *= 2
    return small.view(torch.uint8)


class TwoShotCoder(Coder):
    """Deals parts, adds them up in fp32 and hands out the sums."""

    cap = 1 << 20  # two rounds, and work of the processor before, between and behind them

    def __init__(self, member: BlockLayout, packer: Packer) -> None:
        self.member, self.packer, self.counts = member, packer, packer.draws
        self._noise: NoiseTable | None = None

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        dp, place, block = memory.replicas, memory.place, self.member.block
        rows = self.member.blocks(sum(shape.numel() for shape in shapes), dp)
        x = _fitted(grad, dp * rows * block).view(dp, rows, block)
        length = self.member.part_bytes(rows)
        codes = torch.empty(dp, length, dtype=torch.uint8, device=grad.device)
        for part, code in zip(x, codes, strict=True):
            self.encode(part, code, memory, 0)
        parts = yield Deal(codes.view(-1))
        total = x[place] if dp == 1 else torch.empty_like(x[place])
        self.decode(parts[0], total)
        for part in parts[1:]:
            self.decode(part, total, add=True)
        mine = torch.empty(length, dtype=torch.uint8, device=grad.device)
        self.encode(total, mine, memory, 1)

        def sent() -> Tensor:
            """What this replica gave, and what the sum lost where it added up."""
            gave = torch.empty_like(x)
            for part, code in zip(gave, codes, strict=True):
                self.decode(code, part)
            gave[place].sub_(total)
            self.decode(mine, gave[place], add=True)
            return gave.view(-1)[: len(grad)]

        yield Sent(sent)
        for part, code in zip(x, (yield Gather(mine)), strict=True):
            self.decode(code, part)
        return x.view(-1)[: len(grad)]

    def encode(self, x: Tensor, code: Tensor, memory: BucketMemory, shot: int) -> None:
        """x [rows, block] fp32 → code [bytes] uint8: scales first, then all blocks. shot: 0, or 1 of the sum."""
        work = x.new_empty(min(len(x), self._rows), x.shape[1])
        noises = self._noises(x, memory, shot)
        for rows, scales, codes in self._chunks(x, code):
            self.packer.encode(rows, codes, scales, work[: len(rows)], next(noises))

    def decode(self, code: Tensor, out: Tensor, add: bool = False) -> None:
        """code [bytes] → out [rows, block] fp32, in the place of what is there or added to it."""
        work = out.new_empty(min(len(out), self._rows), out.shape[1]) if add else out
        for rows, scales, codes in self._chunks(out, code):
            if add:
                self.packer.decode(codes, scales, work[: len(rows)])
                rows.add_(work[: len(rows)])
            else:
                self.packer.decode(codes, scales, rows)

    @property
    def _rows(self) -> int:
        return max(1, CHUNK // self.member.block)

    def _chunks(self, x: Tensor, code: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(rows [some, block], scales [some], codes [some, bytes]) of x [rows, block] and its encoded part, views."""
        codes = code[self.member.scale_bytes(len(x)) :].view(len(x), -1)
        scales = code[: torch.bfloat16.itemsize * len(x)].view(torch.bfloat16)
        return zip(x.split(self._rows), scales.split(self._rows), codes.split(self._rows), strict=True)

    def _noises(self, x: Tensor, memory: BucketMemory, shot: int) -> Iterator[Tensor | None]:
        """Of each chunk. Replicas draw apart, or their errors would not cancel."""
        if not self.packer.draws:
            while True:
                yield None
        if self._noise is None:
            self._noise = NoiseTable(memory.seed, CHUNK + self.member.block, x.device)
        names, at = "/".join(memory.names), 0
        while True:
            rows = min(self._rows, len(x) - at)
            drawn = self._noise.drawn(rows * x.shape[1], memory.step, names, memory.place, shot, at)
            yield drawn.view(rows, -1)
            at += rows


def _fitted(grad: Tensor, numel: int) -> Tensor:
    """The gradient in fp32, with zeros up to `numel`, or without zeros beyond it."""
    if grad.dtype == torch.float32 and len(grad) == numel:
        return grad
    x = torch.zeros(numel, dtype=torch.float32, device=grad.device)
    count = min(numel, len(grad))
    x[:count].copy_(grad[:count])
    return x
