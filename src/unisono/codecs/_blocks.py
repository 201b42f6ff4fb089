"""Codecs by blocks: a few bits an element and a scale a block, added up in fp32 by who owns a part.

A sum of such codes means nothing, since each replica's block has a scale of its own. So it takes two rounds, whatever
the number of replicas: each part of the bucket goes to one replica, which decodes what all send, adds it up in fp32,
encodes the sum and hands it out. An element is rounded twice.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.codecs import Coder
from unisono.codecs._dense import Selective
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from unisono.codecs._packing import Packer

SCALE = 2
"""Bytes of a block's scale, a bf16: the range of fp32, where fp16 would have no scale for small gradients."""


class BlockCodec(Selective):
    """A codec by blocks. bits: of an element's code, 1, 2, 4 or 8."""

    tells: ClassVar[bool] = True

    block: int = Field(
        default=256, ge=64, le=65536, multiple_of=64, description="elements that share a scale"
    )

    @property
    def align(self) -> int:  # type: ignore[override]
        return self.block

    @property
    @abstractmethod
    def bits(self) -> int: ...

    def scale_bytes(self, blocks: int) -> int:
        """Of the scales of so many blocks, which lie before their codes: codes are read as words of eight bytes."""
        return -(-SCALE * blocks // 8) * 8

    def part_bytes(self, blocks: int) -> int:
        """Of so many blocks, encoded."""
        return self.scale_bytes(blocks) + blocks * self.block * self.bits // 8

    def blocks(self, numel: int, dp: int) -> int:
        """BlockCodec of one replica's part."""
        return -(-numel // (self.block * dp))

    def coded(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        numel = sum(map(prod, shapes))
        part = self.part_bytes(self.blocks(numel, dp))
        calls = (Call("dp", "all_to_all", part * (dp - 1)), Call("dp", "all_gather", part * (dp - 1)))
        # Encoding reads all and writes codes, decoding the other way; the sum is encoded and decoded too.
        return Work(calls, flops=12 * numel, moved=round(numel * (2 * itemsize + 4 * self.bits / 8)))

    @abstractmethod
    def packer(self) -> "Packer":
        """What encodes and decodes blocks."""

    def coder(self) -> Coder:
        from unisono.codecs._packing import TwoShotCoder

        return TwoShotCoder(self, self.packer())
