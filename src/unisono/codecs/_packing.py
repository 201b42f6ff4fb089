"""BlockCodec of numbers as bytes, and the two rounds in which they are added up; see `_blocks`.

Everything goes chunk by chunk, so that what one operation wrote the next one finds in the core's cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Deal, Exchange, Gather, Sent
from unisono.codecs._blocks import SCALE
from unisono.codecs._noise import NoiseTable

if TYPE_CHECKING:
    from unisono.codecs._blocks import BlockCodec

CHUNK = 1 << 17  # elements of which fp32 and what is made of it fit into a core's cache
UP = 1.0 + 2.0**-7  # a scale in bf16 that was multiplied by this is not below what it was


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
        torch.abs(x, out=work)
        scales.copy_(work.amax(1).mul_(UP / self.levels))
        torch.mul(x, inverse(scales)[:, None], out=work)
        if noise is None:
            work.round_().add_(self.levels)
        else:
            work.add_(noise).add_(self.levels).floor_()
        if self.bits == 8:
            codes.copy_(work)
        else:
            pack(work.to(torch.uint8), codes, self.bits)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        if self.bits == 8:
            out.copy_(codes)
        else:
            unpack(codes, out, self.bits)
        out.sub_(self.levels).mul_(scales.float()[:, None])


class SignPacker(Packer):
    """One bit an element, and the mean magnitude of the block."""

    def encode(self, x: Tensor, codes: Tensor, scales: Tensor, work: Tensor, noise: Tensor | None) -> None:
        torch.abs(x, out=work)
        scales.copy_(work.mean(1))
        pack((x < 0).view(torch.uint8), codes, 1)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        unpack(codes, out, 1)
        wide = scales.float()[:, None]
        out.mul_(-2.0 * wide).add_(wide)


class FloatPacker(Packer):
    """Floating point of eight bits, of which the largest magnitude of a block is the largest number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.most = dtype, torch.finfo(dtype).max

    def encode(self, x: Tensor, codes: Tensor, scales: Tensor, work: Tensor, noise: Tensor | None) -> None:
        torch.abs(x, out=work)
        scales.copy_(work.amax(1).mul_(UP / self.most))
        torch.mul(x, inverse(scales)[:, None], out=work)
        codes.view(self.dtype).copy_(work)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(self.dtype)).mul_(scales.float()[:, None])


def inverse(scales: Tensor) -> Tensor:
    """1 / scale in fp32, and 0 of a block of zeros."""
    wide = scales.float()
    return torch.where(wide == 0, 0.0, 1.0 / wide)


def pack(small: Tensor, codes: Tensor, bits: int) -> None:
    """small [rows, n] uint8, each below 2^bits → codes [rows, n · bits / 8]. Byte i holds elements i, i + n · bits / 8
    and so on, so that eight bytes are shifted at once."""
    planes = small.view(torch.int64).view(small.shape[0], 8 // bits, -1)
    packed = planes[:, 0].clone()
    for k in range(1, 8 // bits):
        packed |= planes[:, k] << (k * bits)
    codes.copy_(packed.view(torch.uint8))


def unpack(codes: Tensor, out: Tensor, bits: int) -> None:
    """codes [rows, n · bits / 8] uint8 → out [rows, n], in its dtype."""
    rows, width = codes.shape
    packed, places = codes.view(torch.int64), out.view(rows, 8 // bits, width)
    words = ((1 << bits) - 1) * 0x0101010101010101
    for k in range(8 // bits):
        places[:, k].copy_(((packed >> (k * bits)) & words).view(torch.uint8))


class TwoShotCoder(Coder):
    """Deals parts, adds them up in fp32 and hands out the sums."""

    def __init__(self, member: "BlockCodec", packer: Packer) -> None:
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
        scales, codes = self._apart(code, len(x))
        work = x.new_empty(min(len(x), self._rows), x.shape[1])
        noises = self._noises(x, memory, shot)
        for at in range(0, len(x), self._rows):
            some = slice(at, at + self._rows)
            rows = x[some]
            self.packer.encode(rows, codes[some], scales[some], work[: len(rows)], next(noises))

    def decode(self, code: Tensor, out: Tensor, add: bool = False) -> None:
        """code [bytes] → out [rows, block] fp32, in the place of what is there or added to it."""
        scales, codes = self._apart(code, len(out))
        work = out.new_empty(min(len(out), self._rows), out.shape[1]) if add else out
        for at in range(0, len(out), self._rows):
            some = slice(at, at + self._rows)
            rows = out[some]
            into = work[: len(rows)] if add else rows
            self.packer.decode(codes[some], scales[some], into)
            if add:
                rows.add_(into)

    @property
    def _rows(self) -> int:
        return max(1, CHUNK // self.member.block)

    def _apart(self, code: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """(scales [rows], codes [rows, bytes]) in an encoded part."""
        codes = code[self.member.scale_bytes(rows) :].view(rows, -1)
        return code[: SCALE * rows].view(torch.bfloat16), codes

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
    some = min(numel, len(grad))
    x[:some].copy_(grad[:some])
    return x
