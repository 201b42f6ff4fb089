"""Elements above thresholds on their way: chosen, packed, given to all, added up in the order of the replicas."""

from collections.abc import Mapping, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs._sparse import above, capped, met, spans, threshold
from unisono_contrib.codecs.threshold import Threshold


class ThresholdCoder(Coder):
    """Each replica's elements above the threshold of their parameter, added up, and beside them what goes whole."""

    counts = True

    def __init__(self, member: Threshold) -> None:
        self.member = member

    def alike(self, name: str, like: Tensor) -> Mapping[str, Tensor]:
        if not self.member.sampled(like.shape):
            return {}
        return {"tau": like.new_zeros((), dtype=like.grad_dtype or like.dtype)}

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
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
