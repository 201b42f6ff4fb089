"""The largest elements alone cross (Aji & Heafield, "Sparse communication for distributed gradient descent", 2017)."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from unisono.codecs import Codec
from unisono.codecs._parcel import Parcel, chunks_of, kept_of
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from unisono.codecs.topk.live import TopKCoder


class TopK(Codec):
    """The largest elements of each parameter, as values and places; bytes grow with the number of replicas.

    Each replica gives a share of its elements to all: (dp - 1) · ratio · elements · (2 + bytes of a value) bytes, which
    is less than a sum sends while ratio · dp < 8 / 6. Every parameter chooses for itself, so that the choice does not
    depend on what travels beside it. What is not sent is lost, unless error feedback keeps it (`+ef`).

    - `kind=exact` sorts all, which takes longer than most networks.
    - `kind=sampled` sorts those above a threshold that it tells from 32,768 elements. It finds the same ones.
    - `kind=chunked` takes the largest of every 4,096 elements.
    """

    name = "topk"
    main = "ratio"
    biased = True
    tells = True
    sparse = True

    ratio: float = Field(0.01, gt=0, le=1, description="share of the elements that are sent")
    kind: Literal["exact", "chunked", "sampled"] = Field(
        "sampled", description="largest of a parameter, of each 4,096, or by a threshold"
    )
    values: Literal["plain", "bf16"] = Field("plain", description="values as they are, or in 2 bytes")

    def parcel(self, numels: Sequence[int], width: int) -> Parcel:
        """What is sent of a bucket of parameters with so many elements, of `width` bytes each."""
        chunked = self.kind == "chunked"
        parts = [length for _, length in chunks_of(numels)] if chunked else numels
        width = 2 if self.values == "bf16" else width
        return Parcel(sum(numels), sum(kept_of(part, self.ratio) for part in parts), width, not chunked)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        numels = [prod(shape) for shape in shapes]
        parcel = self.parcel(numels, itemsize)
        read = 3 * sum(numels) * itemsize  # magnitudes are made, compared, and the sum begins with zeros
        return Work((Call("dp", "all_gather", parcel.nbytes * (dp - 1)),), moved=read)

    def bind(self) -> "TopKCoder":
        from unisono.codecs.topk.live import TopKCoder

        return TopKCoder(self)
