"""The largest elements of a bucket on their way: chosen, packed, given to all, added up in one order."""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Gather, Sent
from unisono.codecs._parcel import CHUNK, chunks_of, kept_of
from unisono.codecs._sparse import added, largest, packed, sampled, spans, spread
from unisono.codecs.topk import TopK


class TopKCoder(Coder):
    """Each replica's largest elements, added up."""

    def __init__(self, member: TopK) -> None:
        self.member = member

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        numels = tuple(shape.numel() for shape in shapes)
        parcel = self.member.parcel(numels, grad.itemsize)
        base = _base(numels, self.member.ratio, grad.device) if self.member.kind == "chunked" else None
        chosen = list(self._chosen(grad, numels))
        places = torch.cat([places for places, _ in chosen])
        values = torch.cat([values for _, values in chosen])
        sent = values.bfloat16() if self.member.values == "bf16" else values
        rows = yield Gather(packed(sent, places, parcel, base))
        yield Sent(lambda: spread(sent, places, grad.new_zeros(parcel.numel)))
        return added(rows, parcel, sent.dtype, grad, base)

    def _chosen(self, grad: Tensor, numels: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """(places in the bucket, values) of each parameter or of the chunks of one; a place that only fills up has
        the value 0."""
        kind, ratio = self.member.kind, self.member.ratio
        for begin, x in spans(grad, numels):
            kept = kept_of(x.numel(), ratio)
            if kind == "exact":
                places, count = largest(x, kept), kept
            elif kind == "sampled":
                places, count = sampled(x, kept)
            else:
                places = by_chunks(x, ratio)
                count = places.numel()
            values = x[places]
            values[count:] = 0
            yield places + begin, values


def by_chunks(x: Tensor, ratio: float) -> Tensor:
    """Places of the largest magnitudes of each chunk of x [n], chunk by chunk."""
    whole = x.numel() // CHUNK * CHUNK
    found = [torch.arange(0, device=x.device)]
    if whole:
        rows = x[:whole].view(-1, CHUNK).abs()
        begins = torch.arange(0, whole, CHUNK, device=x.device).unsqueeze(1)
        found.append((rows.topk(kept_of(CHUNK, ratio), sorted=False).indices + begins).view(-1))
    if rest := x.numel() - whole:
        found.append(largest(x[whole:], kept_of(rest, ratio)) + whole)
    return torch.cat(found)


@cache
def _base(numels: tuple[int, ...], ratio: float, device: torch.device) -> Tensor:
    """Where in the bucket the chunk begins from which each place that is sent counts."""
    chunks = chunks_of(numels)
    begins = torch.tensor([begin for begin, _ in chunks], dtype=torch.int64, device=device)
    counts = torch.tensor([kept_of(length, ratio) for _, length in chunks], dtype=torch.int64, device=device)
    return begins.repeat_interleave(counts)
