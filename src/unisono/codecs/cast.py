"""Gradients in fewer bits of floating point (Micikevicius et al., "Mixed precision training", 2018).

bf16 and fp16 are added up as they are, so any all-reduce will do. fp16 is divided by the number of replicas before,
since it ends at 65,504. fp8 (e4m3, Micikevicius et al., "FP8 formats for deep learning", 2022) travels as bytes with a
scale for each block, in two rounds.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unisono.codecs import BucketMemory, Codec, Coder, Exchange, Sent, Sum
from unisono.codecs._blocks import BlockCodec
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor

    from unisono.codecs._packing import Packer

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}  # roundoff


class Cast(Codec):
    """Fewer bits of floating point: bf16 and fp16 are added up as such, fp8 in blocks with a scale."""

    name = "cast"
    main = "dtype"
    error: ClassVar[float] = 0.1
    tells: ClassVar[bool] = True

    dtype: Literal["bf16", "fp16", "fp8"] = Field(default="bf16", description="of what is sent")

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.dtype != "fp8"

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.linear

    def lost(self, dp: int) -> float:
        """Each addition rounds once more; two rounds of fp8 round twice."""
        times = 2 if self.dtype == "fp8" else dp
        return 4.0 * UNIT[self.dtype] * (times**0.5 + 1.0)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        if self.dtype == "fp8":
            return _EightBitFloats().work(shapes, itemsize, dp)
        numel = sum(map(prod, shapes))
        moved = 2 * numel * (itemsize + 2)
        return Work((Call("dp", "all_reduce", 2 * 2 * numel * (dp - 1) // dp),), moved=moved)

    def bind(self) -> Coder:
        return _EightBitFloats().bind() if self.dtype == "fp8" else CastCoder(self.dtype)


class _EightBitFloats(BlockCodec):
    """As `BlockCodec` of floating point."""

    name = "cast"
    bits: ClassVar[int] = 8  # type: ignore[override]

    def packer(self) -> "Packer":
        import torch

        from unisono.codecs._packing import FloatPacker

        return FloatPacker(torch.float8_e4m3fn)


class CastCoder(Coder):
    """One sum, in another dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        import torch

        share = 1.0 / memory.replicas if self.dtype == "fp16" else 1.0
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]
        code = (grad * share if share != 1.0 else grad).to(narrow)
        yield Sent(lambda: code.to(grad.dtype).div_(share))
        total = grad.copy_((yield Sum(code)))
        return total if share == 1.0 else total.div_(share)
