"""Elements above a threshold cross (Strom, "Scalable distributed DNN training using commodity GPU cloud computing",
2015)."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs._parcel import Parcel, Sparse
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor


class Threshold(Sparse):
    """Elements of at least a magnitude, as values and places; the magnitude is given, or told every 32nd step.

    What is sent has one length on all replicas: `ratio` of the elements. Where more are above the threshold the largest
    of them go, where fewer are, zeros fill up. Without `tau` each parameter has a threshold of its own: the mean of
    those by which each replica would take half of the places, told from a sample and kept for `every` steps (Li &
    Hoefler, Ok-Topk, 2022). What is not sent is lost, unless error feedback keeps it (`+ef`).
    """

    name = "threshold"
    main = "tau"

    tau: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="least magnitude that is sent; 0: by samples"
    )
    ratio: float = Field(default=0.02, gt=0, le=1, description="share of the elements that are sent at most")
    every: int = Field(32, ge=1, description="steps for which a threshold by samples is kept")
    values: Literal["plain", "bf16"] = Field("plain", description="values as they are, or in 2 bytes")

    def sampled(self, shape: Sequence[int]) -> bool:
        """Whether this parameter has a threshold that is told from samples."""
        return not self.tau and self.share(shape) < 1 and prod(shape) > 0

    def kept(self, shape: Sequence[int]) -> int:
        """None of what goes whole: it is added up beside."""
        return 0 if self.spared(shape) else super().kept(shape)

    def parcel(self, shapes: Sequence[Sequence[int]], width: int) -> Parcel:
        """What is sent of a bucket of parameters with these shapes, of `width` bytes an element."""
        kept = sum(map(self.kept, shapes))
        return Parcel(sum(map(prod, shapes)), kept, 2 if self.values == "bf16" else width)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        parcel, thresholds = self.parcel(shapes, itemsize), sum(map(self.sampled, shapes))
        whole = sum(prod(shape) for shape in shapes if self.spared(shape)) * itemsize
        calls = [Call("dp", "all_gather", parcel.nbytes * (dp - 1))] if parcel.kept else []
        sums = ((whole, 1.0), (thresholds * itemsize, 1 / self.every))
        calls += [Call("dp", "all_reduce", 2 * n * (dp - 1) // dp, times) for n, times in sums if n]
        return Work(tuple(calls), kept=thresholds * itemsize, moved=3 * parcel.numel * itemsize)

    def bind(self) -> "ThresholdCoder":
        return ThresholdCoder(self)


class ThresholdCoder(Coder):
    """Each replica's elements above the threshold of their parameter, added up, and beside them what goes whole."""

    counts = True

    def __init__(self, member: Threshold) -> None:
        self.member = member

    def alike(self, name: str, like: "Tensor") -> "Mapping[str, Tensor]":
        if not self.member.sampled(like.shape):
            return {}
        return {"tau": like.new_zeros((), dtype=like.grad_dtype or like.dtype)}

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        import torch

        from unisono.codecs._sparse import above, capped, met, spans, threshold

        member, parts = self.member, list(spans(grad, [shape.numel() for shape in shapes]))
        parcel, kept = member.parcel(shapes, grad.itemsize), [member.kept(shape) for shape in shapes]
        if not parcel.kept:
            yield Sent(lambda: grad)
            return (yield Sum(grad))
        taus = [alike.get("tau") for alike in memory.alike]
        if memory.step % member.every == 0 and any(tau is not None for tau in taus):
            limits = [
                threshold(x, n / 2)
                for (_, x), n, tau in zip(parts, kept, taus, strict=True)
                if tau is not None
            ]
            agreed = yield Sum(torch.stack(limits) / memory.replicas)
            agreed.nan_to_num_(0.0, 0.0)  # nothing would be above infinity, not even what overflowed
            for tau, new in zip((tau for tau in taus if tau is not None), agreed, strict=True):
                tau.copy_(new)
        chosen, values = [], []
        for (begin, x), shape, tau in zip(parts, shapes, taus, strict=True):
            if member.spared(shape):
                continue
            n, least = member.kept(shape), grad.new_full((), member.tau) if tau is None else tau
            places = torch.arange(n, device=x.device) if n == x.numel() else above(x, least)
            places, count = capped(x, places, n)
            values.append(x[places])
            values[-1][count:] = 0
            chosen.append(places + begin)
        places, sent = torch.cat(chosen), torch.cat(values)
        sent = sent.bfloat16() if member.values == "bf16" else sent
        return (yield from met(member, grad, shapes, sent, places, parcel))
