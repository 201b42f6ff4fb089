"""Levels drawn at random (Alistarh et al., "QSGD", 2017): an element goes up or down a level so that its mean is right.

The largest magnitude of a block is the last level, as in the paper's experiments; codes have a fixed width.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from unisono.codecs._blocks import BlockCodec
from unisono.codecs.int8 import rounded_twice

if TYPE_CHECKING:
    from unisono.codecs._packing import Packer


class DrawnLevels(BlockCodec):
    """Levels drawn at random with the right mean: 8 bits, 4 bits up to 7 levels, 2 bits with one."""

    name = "qsgd"
    main = "levels"
    levels: int = Field(default=127, ge=1, le=127, description="levels on each side of zero")

    @property
    def bits(self) -> int:
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    @property
    def error(self) -> float:  # type: ignore[override]
        return 4.0 / self.levels

    @property
    def contracts(self) -> bool:
        """An element is off by less than a level, which is the block's largest over `levels`. With one level that is
        no less than what was drawn from."""
        return self.levels > 1

    def lost(self, dp: int) -> float:
        return rounded_twice(self.levels, dp, 1.0)

    def packer(self) -> "Packer":
        from unisono.codecs._packing import LevelPacker

        return LevelPacker(self.levels, self.bits, draws=True)
