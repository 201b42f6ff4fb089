"""Where a tensor's samples are, and whether they have met: what is known of a value that was computed from a batch.

Ranks hold parts of a batch, so the mean of their gradients is that of one device as long as two things hold: nothing
but a linear sum or mean goes over the samples, and what comes of it is only added up and multiplied by constants.
A `SampleTrace` says of one tensor how far that holds. The rules of single operations are in `trace_rules`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """dim: the dim along which the samples lie, None where none does any more. That dim counts outer x samples x inner
    entries. order: in which order the samples lie, () for that of the batch. reduced: the sum or mean over samples that
    is in it, and in which it is still linear; "" for none. met: what it did to samples that a rank cannot do to a part
    of a batch; "" for nothing."""

    batch: int
    samples: int
    dim: int | None = 0
    inner: int = 1
    outer: int = 1
    order: tuple[object, ...] = ()
    reduced: str = ""
    met: str = ""

    @property
    def extent(self) -> int:
        """Entries of the dim that holds the samples."""
        return self.outer * self.samples * self.inner

    def at(self, dim: int) -> "SampleTrace":
        return replace(self, dim=dim)

    def says(self, met: str) -> "SampleTrace":
        """The first that was noticed stays."""
        return self if self.met else replace(self, met=met)

    def bent(self, by: str) -> "SampleTrace":
        """After something that is not linear in what it is given."""
        return self.says(f"{by} of a {self.reduced}") if self.reduced else self

    def summed(self, by: str) -> "SampleTrace":
        """After a sum or mean over the samples."""
        return replace(
            self, dim=None, inner=1, outer=1, order=(), reduced=self.reduced or f"{by} over the samples"
        )


def viewed(trace: SampleTrace, before: Shape, after: Shape) -> SampleTrace | None:
    """After a view of contiguous numbers in another shape; None where the samples no longer lie along one dim.

    In the flat memory the samples are `stride` apart; a dim of the new shape has them if it covers all of them."""
    if trace.dim is None:
        return trace
    stride = trace.inner * prod(before[trace.dim + 1 :])
    behind = prod(after)
    for dim, size in enumerate(after):
        whole, behind = behind, behind // max(size, 1)
        if behind and behind <= stride and stride * trace.samples <= whole:
            split = stride % behind or whole % (stride * trace.samples)
            outer = whole // (stride * trace.samples)
            return None if split else replace(trace, dim=dim, inner=stride // behind, outer=outer)
    return None


def together(traces: Sequence[tuple[SampleTrace, int]], out: Shape, by: str) -> SampleTrace | None:
    """Of an operation that takes entries at the same place: traces with their tensors' numbers of dims, as they are
    broadcast to `out`. None where nothing can be said."""
    first = next((one for one, _ in traces if one.dim is not None), traces[0][0])
    if any(
        (one.batch, one.samples) != (first.batch, first.samples) for one, _ in traces if one.dim is not None
    ):
        return None  # a statistic of an earlier batch may meet this one; samples of two batches are no one's business
    rows = [(one, one.dim - dims + len(out)) for one, dims in traces if one.dim is not None]
    reduced = next((one.reduced for one, _ in traces if one.reduced), "")
    met = next((one.met for one, _ in traces if one.met), "")
    if not rows:
        return replace(first, reduced=reduced, met=met)
    lead, place = rows[0]
    if out[place] != lead.extent:
        return None
    made = replace(lead, dim=place, reduced=reduced, met=met)
    for one, other in rows[1:]:
        if other != place:
            made = made.says(f"{by} of pairs of samples")
        elif (one.inner, one.outer) != (lead.inner, lead.outer):
            return None
        elif one.order != lead.order:
            moved = [*one.order, *lead.order][0]
            made = made.says(f"{moved[0] if isinstance(moved, tuple) else moved} of the samples")
    return made
