"""The largest elements alone cross (Aji & Heafield, "Sparse communication for distributed gradient descent", 2017)."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from unisono.codecs._parcel import CHUNK, Parcel, Sparse, kept_of
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from unisono.codecs.topk.live import TopKCoder


class TopK(Sparse):
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

    kind: Literal["exact", "chunked", "sampled"] = Field(
        "sampled", description="largest of a parameter, of each 4,096, or by a threshold"
    )
    values: Literal["plain", "bf16"] = Field("plain", description="values as they are, or in 2 bytes")

    def regions(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """(begin, length, elements that are sent) of each part of a parameter that chooses for itself. What goes whole
        has none: it is added up beside."""
        if self.spared(shape):
            return []
        numel, share = prod(shape), self.share(shape)
        length = CHUNK if self.kind == "chunked" else max(1, numel)
        sizes = ((at, min(length, numel - at)) for at in range(0, numel, length))
        return [(at, size, kept_of(size, share)) for at, size in sizes]

    def parcel(self, shapes: Sequence[Sequence[int]], width: int) -> Parcel:
        """What is sent of a bucket of parameters with these shapes, of `width` bytes an element."""
        kept = sum(kept for shape in shapes for _, _, kept in self.regions(shape))
        width = 2 if self.values == "bf16" else width
        return Parcel(sum(map(prod, shapes)), kept, width, self.kind != "chunked")

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        parcel = self.parcel(shapes, itemsize)
        read = 3 * parcel.numel * itemsize  # magnitudes are made, compared, and the sum begins with zeros
        whole = sum(prod(shape) for shape in shapes if self.spared(shape)) * itemsize
        calls = (Call("dp", "all_gather", parcel.nbytes * (dp - 1)),) if parcel.kept else ()
        beside = (Call("dp", "all_reduce", 2 * whole * (dp - 1) // dp),) if whole else ()
        return Work((*beside, *calls), moved=read)

    def bind(self) -> "TopKCoder":
        from unisono.codecs.topk.live import TopKCoder

        return TopKCoder(self)
