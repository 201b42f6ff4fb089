"""Where a tensor's samples are, and whether they have met: what is known of a value that was computed from a batch.

Ranks hold parts of a batch, so the mean of their gradients is that of one device as long as two things hold: nothing
but a linear sum or mean goes over the samples, and what comes of it is only added up and multiplied by constants.
A `SampleTrace` says of one tensor how far that holds. A `TorchCall` is one call of an operation, as its rule in
`tracing_rules` sees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class SampleTrace:
    """dim: the dim along which the samples lie, None where none does any more. That dim counts outer x samples x inner
    entries. order: in which order the samples lie, () for that of the batch. reduced: the sum or mean over samples that
    is in it, and in which it is still linear; "" for none. met: what it did to samples that a rank cannot do to a part
    of a batch; "" for nothing. undivided: a sum over samples that nothing has made a mean yet; "" for none. terms: of
    each mean over samples that is in it, how many numbers of a sample it goes over."""

    batch: int
    samples: int
    dim: int | None = 0
    inner: int = 1
    outer: int = 1
    order: tuple[object, ...] = ()
    reduced: str = ""
    met: str = ""
    undivided: str = ""
    terms: tuple[float, ...] = ()

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
        reduced = self.reduced or f"{by} over the samples"
        return replace(self, dim=None, inner=1, outer=1, order=(), reduced=reduced)

    def divided(self, number: float, ranks: int) -> "SampleTrace":
        """After a division by a number: a sum over samples becomes a mean by a multiple of the samples here."""
        whole = round(number)
        if not self.undivided or abs(number) <= 1:
            return self
        if whole == self.samples * ranks > self.samples:
            return self.says(f"a sum divided by {whole}, the samples of the global batch")
        if abs(number - whole) < 1e-9 and whole % self.samples == 0:
            return replace(self, undivided="")
        return replace(self, undivided=f"a sum divided by {number:g}, where {self.samples} samples are here")


Found = SampleTrace | None | Sequence[SampleTrace | None]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """name: of the operation, such as `mul`, without the underscore of those in place. arguments: by name. of:
    the trace of a tensor. outs: what it returned. weighed: whether the script said what its loss counts. ranks: that
    share a batch."""

    name: str
    arguments: dict[str, Any]
    of: Callable[[Any], SampleTrace | None]
    outs: list[Tensor]
    weighed: bool = False
    ranks: int = 1

    @property
    def out(self) -> Shape:
        return self.outs[0].shape

    def tensors(self, *names: str) -> list[tuple[SampleTrace, int]]:
        """Traces of tensors among the arguments, or of those with these names, with their numbers of dims."""
        values = [self.arguments.get(name) for name in names] if names else list(self.arguments.values())
        flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
        return [(trace, x.dim()) for x in flat if isinstance(x, Tensor) and (trace := self.of(x)) is not None]


def listed(dims: Any, count: int) -> list[int]:
    """Dims as an argument gives them, counted from the front; all if it gives none."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(count))
    return [d % max(count, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


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
    """Return the trace of an operation that takes entries at the same place of all its arguments. traces: each with its
    tensor's number of dims. out: the shape that they are broadcast to. None where nothing can be said."""
    first = next((part for part, _ in traces if part.dim is not None), traces[0][0])
    if any(
        (part.batch, part.samples) != (first.batch, first.samples)
        for part, _ in traces
        if part.dim is not None
    ):
        return None  # a statistic of an earlier batch may meet this one; samples of two batches are no one's business
    rows = [(part, part.dim - dims + len(out)) for part, dims in traces if part.dim is not None]
    if not rows:
        return mixed(first, traces)
    lead, place = rows[0]
    if out[place] != lead.extent:
        return None
    result = replace(mixed(lead, traces), dim=place)
    for part, other in rows[1:]:
        if other != place:
            result = result.says(f"{by} of pairs of samples")
        elif (part.inner, part.outer) != (lead.inner, lead.outer):
            return None
        elif part.order != lead.order:
            moved = [*part.order, *lead.order][0]
            result = result.says(f"{moved[0] if isinstance(moved, tuple) else moved} of the samples")
    return result


def mixed(lead: SampleTrace, traces: Sequence[tuple[SampleTrace, int]]) -> SampleTrace:
    """`lead` with what is known of all these: the first sum or mean, the first meeting, every mean's terms."""
    known = [trace for trace, _ in traces]
    return replace(
        lead,
        reduced=next((trace.reduced for trace in known if trace.reduced), ""),
        met=next((trace.met for trace in known if trace.met), ""),
        undivided=next((trace.undivided for trace in known if trace.undivided), ""),
        terms=tuple(dict.fromkeys(number for trace in known for number in trace.terms)),
    )
