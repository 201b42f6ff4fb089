"""One bit an element (Seide et al., "1-bit stochastic gradient descent", 2014): signs, and the mean magnitude of each
block. Who adds up a part feeds back what its own rounding lost, beside what each replica lost (Tang et al., "1-bit
Adam", 2021)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from unisono.codecs._blocks import BlockCodec
from unisono.spec.errors import Problem

if TYPE_CHECKING:
    from unisono.codecs._packing import Packer


class Signs(BlockCodec):
    """Signs alone, with the mean magnitude of each block; only with error feedback, and not for Adam."""

    name = "sign"
    error: ClassVar[float] = 1.5
    bits: ClassVar[int] = 1  # type: ignore[override]
    biased: ClassVar[bool] = True
    diverges: ClassVar[bool] = True
    contracts: ClassVar[bool] = True  # type: ignore[override]  # the mean magnitude is what signs are nearest to

    block: int = Field(
        default=1024, ge=64, le=65536, multiple_of=64, description="elements whose mean magnitude is sent"
    )

    def problems(self, plan: Any, train: Any) -> Iterator[Problem]:
        chosen = train.optimiser()
        if chosen.squares:
            why = "makes all elements of a block alike large"
            what = f"codec={plan.codec} {why}, and {chosen.name} divides by their size"
            fix = "codec=int4+ef, or --train.optimizer sgd"
            yield Problem("P23", what, "plan.codec, train.optimizer", fix)

    def packer(self) -> "Packer":
        from unisono.codecs._packing import SignPacker

        return SignPacker()
