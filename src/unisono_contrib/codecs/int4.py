"""Four bits an element: integers, with a scale for each block of them. As `int8`, in smaller blocks."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from unisono.codecs._blocks import BlockCodec
from unisono.codecs.int8 import rounded_twice

if TYPE_CHECKING:
    from unisono.codecs._packing import Packer


class NibbleLevels(BlockCodec):
    """Whole numbers of 4 bits, a scale for each block of 64; small elements become zero, which `+ef` makes good."""

    name = "int4"
    error: ClassVar[float] = 0.4
    bits: ClassVar[int] = 4  # type: ignore[override]
    biased: ClassVar[bool] = True

    block: int = Field(default=64, ge=64, le=65536, multiple_of=64, description="elements that share a scale")

    def lost(self, dp: int) -> float:
        return rounded_twice(7, dp)

    def packer(self) -> "Packer":
        from unisono.codecs._packing import LevelPacker

        return LevelPacker(7, self.bits)
