"""Elements above a threshold cross (Strom, "Scalable distributed DNN training using commodity GPU cloud computing",
2015)."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from unisono.codecs import Codec
from unisono.codecs._parcel import Parcel, kept_of
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from unisono.codecs.threshold.live import ThresholdCoder


class Threshold(Codec):
    """Elements of at least a magnitude, as values and places; the magnitude is given, or told every 32nd step.

    What is sent has one length on all replicas: `ratio` of the elements. Where more are above the threshold the largest
    of them go, where fewer are, zeros fill up. Without `tau` each parameter has a threshold of its own: the mean of
    those by which each replica would take half of the places, told from a sample and kept for `every` steps (Li &
    Hoefler, Ok-Topk, 2022). What is not sent is lost, unless error feedback keeps it (`+ef`).
    """

    name = "threshold"
    main = "tau"
    biased = True
    tells = True
    sparse = True

    tau: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="least magnitude that is sent; 0: by samples"
    )
    ratio: float = Field(0.02, gt=0, le=1, description="share of the elements that are sent at most")
    every: int = Field(32, ge=1, description="steps for which a threshold by samples is kept")
    values: Literal["plain", "bf16"] = Field("plain", description="values as they are, or in 2 bytes")

    def parcel(self, numels: Sequence[int], width: int) -> Parcel:
        """What is sent of a bucket of parameters with so many elements, of `width` bytes each."""
        kept = sum(kept_of(numel, self.ratio) for numel in numels)
        return Parcel(sum(numels), kept, 2 if self.values == "bf16" else width)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        numels = [prod(shape) for shape in shapes]
        calls = [Call("dp", "all_gather", self.parcel(numels, itemsize).nbytes * (dp - 1))]
        if not self.tau:
            agreed = 2 * len(shapes) * itemsize * (dp - 1) // dp
            calls.append(Call("dp", "all_reduce", agreed, 1 / self.every))
        kept = 0 if self.tau else len(shapes) * itemsize
        return Work(tuple(calls), kept=kept, moved=3 * sum(numels) * itemsize)

    def bind(self) -> "ThresholdCoder":
        from unisono.codecs.threshold.live import ThresholdCoder

        return ThresholdCoder(self)
