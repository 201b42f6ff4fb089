"""The largest elements of each chunk, two bits each: the wire of SparseLoCo (Sarfi et al., "Communication efficient LLM
pre-training with SparseLoCo", 2025)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from unisono.codecs._dense import Selective
from unisono.codecs._parcel import CHUNK
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from unisono_contrib.codecs.chunktopk.live import ChunkTopKCoder

SIDE = 64
"""Of the tiles whose frequencies are taken."""
BATCH = 64
"""Elements whose bits are packed together: as many as one bit of each fills a word of eight bytes."""
COUNT = 8
"""Bytes of the number at the beginning of a payload."""


class ChunkTopK(Selective):
    """The `top` largest elements of each `chunk`, two bits each, with indices as Golomb-Rice gaps.

    A rank sends about `elements · top / chunk · (2 + 7.5)` bits and 3 bytes a chunk to each other one, with the options
    as they are: 1/207 of fp32. Every parameter is cut into chunks by itself; of a shorter one, proportionally many
    elements are sent, at least one. Two gathers: the second one, of gaps, is as long as the longest of any replica.

    - `values=2bit` sends a sign and one of two levels. Levels are the means of the chunk's larger and smaller values
      that are sent, cut where one step of Lloyd's algorithm (1982) cuts them.
    - `values=bf16` and `values=plain` send values in two bytes, or as they are.

    What is not sent is lost, unless error feedback keeps it: `chunktopk+ef:beta=0.95` is SparseLoCo's. With `dct` the
    elements are those of parameters' cosine transforms, as in DeMo (Peng et al. 2024, arXiv 2411.19870), whose setting
    is `chunktopk:top=32,dct=true+ef:beta=0.999` before a step by the sign.
    """

    name = "chunktopk"
    main = "top"
    biased = True
    tells = True
    sparse = True
    varies = True

    chunk: int = Field(default=CHUNK, ge=BATCH, le=1 << 20, description="elements that are compared together")
    top: int = Field(default=64, ge=1, description="of these, how many are sent")
    values: Literal["2bit", "bf16", "plain"] = Field(
        default="2bit", description="a sign and one of two levels, or in 2 bytes, or as they are"
    )
    dct: bool = Field(
        default=False, description="choose among frequencies of tiles of 64 × 64 elements, not among elements"
    )
    dense: int = Field(
        default=0,
        ge=0,
        description="parameters of fewer elements, or of one dim, travel as they are; 0: none does",
    )

    @field_validator("top")
    @classmethod
    def _fits(cls, top: int, info: Any) -> int:
        if top > (chunk := info.data.get("chunk", top)):
            raise ValueError(f"no more than the {chunk} elements of a chunk can be sent")
        return top

    @property
    def fidelity(self) -> Fidelity:  # type: ignore[override]
        return Fidelity.ROUNDING if self.top == self.chunk and self.values == "plain" else Fidelity.LOSSY

    def lost(self, dp: int) -> float:
        """A coefficient that is not sent may be that of a tile that is the same everywhere: as large as its norm."""
        return SIDE * super().lost(dp) if self.dct else super().lost(dp)

    def kept(self, size: int) -> int:
        """How many of the elements of a chunk of this size are sent."""
        return -(-size * self.top // self.chunk)

    def layout(self, shapes: Sequence[Sequence[int]], itemsize: int) -> "PayloadLayout":
        """What is sent of a bucket of parameters with these shapes, of `itemsize` bytes an element."""
        cuts = [divmod(prod(shape), self.chunk) for shape in shapes]
        chunks = sum(full + (rest > 0) for full, rest in cuts)
        kept = sum(full * self.top + self.kept(rest) for full, rest in cuts)
        width = {"2bit": 0, "bf16": 2, "plain": itemsize}[self.values]
        return PayloadLayout(chunks, kept, rice_parameter(self.chunk, self.top), width)

    def coded(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        layout = self.layout(shapes, itemsize)
        if not layout.kept:
            return Work()
        cuts, low = [divmod(prod(shape), self.chunk) for shape in shapes], layout.low
        whole = sum(full for full, _ in cuts) * unary_bits(self.chunk, self.top, low)
        bits = whole + sum(unary_bits(rest, self.kept(rest), low) for _, rest in cuts if rest)
        calls = tuple(Call("dp", "all_gather", n * (dp - 1)) for n in (layout.nbytes, up(bits) // 8))
        # Magnitudes are made and compared, what is sent is decoded for each replica, and the sum begins with zeros.
        numel = sum(map(prod, shapes))
        flops = 2 * numel + (8 * SIDE * numel if self.dct else 0)  # there and back, along rows and columns
        return Work(calls, flops=flops, moved=4 * numel * itemsize + 32 * dp * layout.kept)

    def coder(self) -> "ChunkTopKCoder":
        from unisono_contrib.codecs.chunktopk.live import ChunkTopKCoder

        return ChunkTopKCoder(self)


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Where things lie in what a replica sends first of a bucket: bytes of its gaps, levels, values, low bits of gaps.

    chunks: of the bucket. kept: elements that are sent. low: bits of a gap that are sent as they are, the parameter of
    the Rice code. width: bytes of a value, 0 for two bits. Each part begins at a multiple of eight bytes.
    """

    chunks: int
    kept: int
    low: int
    width: int

    @property
    def padded(self) -> int:
        """Elements of which bits are packed."""
        return up(self.kept)

    @property
    def ratios(self) -> int:
        """Byte at which ratios of levels begin, a byte each; before them lie upper levels, a bf16 each."""
        return COUNT + (0 if self.width else _aligned(2 * self.chunks))

    @property
    def values(self) -> int:
        """Byte at which values begin."""
        return self.ratios + (0 if self.width else _aligned(self.chunks))

    @property
    def lows(self) -> int:
        """Byte at which the low bits of gaps begin."""
        return self.values + (_aligned(self.width * self.kept) if self.width else self.padded // 4)

    @property
    def nbytes(self) -> int:
        """Of all."""
        return self.lows + self.padded * self.low // 8


def rice_parameter(length: int, kept: int) -> int:
    """Low bits of a gap that make a Rice code shortest, if `kept` places are drawn of `length`. (4096, 64) → 5."""
    return min(range(length.bit_length()), key=lambda low: kept * low + unary_bits(length, kept, low))


def unary_bits(length: int, kept: int, low: int) -> float:
    """Expected bits of the unary parts of `kept` gaps, if places are drawn of `length` without preference: a gap of g
    elements takes 1 + ⌊g / 2^low⌋. (4096, 64, 5) → 161.3."""
    skipped = ((length - kept) / (length + 1)) ** (
        1 << low
    )  # the chance that a gap goes on for 2^low elements more
    return kept * (1.0 + skipped / (1.0 - skipped))


def up(bits: float) -> int:
    """The next multiple of 64."""
    return -int(-bits // BATCH) * BATCH


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
