"""Eight bits an element: integers, with a scale for each block of them.

Dettmers, "8-bit approximations for parallelism in deep learning" (2016); in two rounds as in Wang et al., "ZeRO++"
(2023).
"""

from typing import TYPE_CHECKING, ClassVar

from unisono.codecs._blocks import BlockCodec

if TYPE_CHECKING:
    from unisono.codecs._packing import Packer


class ByteLevels(BlockCodec):
    """Whole numbers of 8 bits, a scale for each block of 256."""

    name = "int8"
    error: ClassVar[float] = 0.03
    bits: ClassVar[int] = 8  # type: ignore[override]

    def lost(self, dp: int) -> float:
        return rounded_twice(127, dp)

    def packer(self) -> "Packer":
        from unisono.codecs._packing import LevelPacker

        return LevelPacker(127, self.bits)


def rounded_twice(levels: int, dp: int, step: float = 0.5) -> float:
    """Largest error of an element over the largest element of its parameter, rounded by `step` of a level before and
    after the sum. Each replica's numbers are taken to be sqrt(dp) times smaller than their sum; with a margin of two
    for where replicas contradict each other more than chance would have them."""
    return 2.0 * step * 1.01 * (dp**0.5 + 1.0) / levels
