"""Elements above thresholds on their way: chosen, packed, given to all, added up in the order of the replicas."""

from collections.abc import Mapping, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Gather, Sent, Sum
from unisono.codecs._parcel import kept_of
from unisono.codecs._sparse import above, added, capped, packed, spans, spread, threshold
from unisono.codecs.threshold import Threshold


class ThresholdCoder(Coder):
    """Each replica's elements above the threshold of their parameter, added up."""

    counts = True

    def __init__(self, member: Threshold) -> None:
        self.member = member

    def alike(self, name: str, like: Tensor) -> Mapping[str, Tensor]:
        return {} if self.member.tau else {"tau": like.new_zeros((), dtype=like.grad_dtype or like.dtype)}

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        member, numels = self.member, [shape.numel() for shape in shapes]
        if not member.tau and memory.step % member.every == 0:
            told = [threshold(x, kept_of(x.numel(), member.ratio) / 2) for _, x in spans(grad, numels)]
            agreed = yield Sum(torch.stack(told) / memory.replicas)
            agreed.nan_to_num_(0.0, 0.0)  # nothing would be above infinity, not even what overflowed
            for tau, kept in zip(agreed, memory.alike, strict=True):
                kept["tau"].copy_(tau)
        parcel, found, values = member.parcel(numels, grad.itemsize), [], []
        for (begin, x), kept in zip(spans(grad, numels), memory.alike, strict=True):
            least = kept.get("tau", grad.new_full((), member.tau))
            places, count = capped(x, above(x, least), kept_of(x.numel(), member.ratio))
            values.append(x[places])
            values[-1][count:] = 0
            found.append(places + begin)
        places, sent = torch.cat(found), torch.cat(values)
        sent = sent.bfloat16() if member.values == "bf16" else sent
        rows = yield Gather(packed(sent, places, parcel))
        yield Sent(lambda: spread(sent, places, grad.new_zeros(parcel.numel)))
        return added(rows, parcel, sent.dtype, grad)
