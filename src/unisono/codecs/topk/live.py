"""The largest elements of a bucket on their way: chosen, packed, given to all, added up in one order."""

from collections.abc import Iterator, Sequence

import torch
from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Exchange, Sent, Sum
from unisono.codecs._parcel import CHUNK, kept_of
from unisono.codecs._sparse import chunked, largest, met, sampled, spans
from unisono.codecs.topk import TopK


class TopKCoder(Coder):
    """Each replica's largest elements, added up, and beside them what goes whole."""

    def __init__(self, member: TopK) -> None:
        self.member = member
        self._bases: dict[tuple[Size, ...], Tensor] = {}  # by the shapes of a bucket

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        parcel = self.member.parcel(shapes, grad.itemsize)
        if not parcel.kept:
            yield Sent(lambda: grad)
            return (yield Sum(grad))
        base = None if parcel.tallied else self._base(tuple(shapes), grad.device)
        chosen = list(self._chosen(grad, shapes))
        places = torch.cat([places for places, _ in chosen])
        values = torch.cat([values for _, values in chosen])
        sent = values.bfloat16() if self.member.values == "bf16" else values
        return (yield from met(self.member, grad, shapes, sent, places, parcel, base))

    def _base(self, shapes: tuple[Size, ...], device: torch.device) -> Tensor:
        """Where in the bucket the chunk begins from which each place that is sent counts."""
        if shapes not in self._bases:
            begins, counts, begin = [], [], 0
            for shape in shapes:
                for at, _, kept in self.member.regions(shape):
                    begins.append(begin + at)
                    counts.append(kept)
                begin += shape.numel()
            chunks = torch.tensor(begins, dtype=torch.int64, device=device)
            self._bases[shapes] = chunks.repeat_interleave(torch.tensor(counts, device=device).long())
        return self._bases[shapes]

    def _chosen(self, grad: Tensor, shapes: Sequence[Size]) -> Iterator[tuple[Tensor, Tensor]]:
        """(places in the bucket, values) of each parameter; a place that only fills up has the value 0."""
        choose = CHOICES[self.member.kind]
        for (begin, x), shape in zip(spans(grad, [s.numel() for s in shapes]), shapes, strict=True):
            if self.member.spared(shape):
                continue
            places, count = choose(x, self.member.ratio)
            values = x[places]
            values[count:] = 0
            yield places + begin, values


def exactly(x: Tensor, share: float) -> tuple[Tensor, int]:
    """(places of the largest magnitudes of x [n], how many of them mean something)."""
    kept = kept_of(x.numel(), share)
    return largest(x, kept), kept


def by_threshold(x: Tensor, share: float) -> tuple[Tensor, int]:
    """As `exactly`."""
    return sampled(x, kept_of(x.numel(), share))


def by_chunks(x: Tensor, share: float) -> tuple[Tensor, int]:
    """Of the largest magnitudes of each chunk of x [n], chunk by chunk."""
    chosen = [torch.arange(0, device=x.device)]
    for begins, rows in chunked(x, CHUNK):
        indices = rows.abs().topk(kept_of(rows.shape[1], share), sorted=False).indices
        chosen.append(indices.add_(begins).view(-1))
    places = torch.cat(chosen)
    return places, places.numel()


CHOICES = {"exact": exactly, "sampled": by_threshold, "chunked": by_chunks}
