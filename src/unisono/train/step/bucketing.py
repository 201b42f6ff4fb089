"""Which gradients travel together, and which may leave while backward goes on: settled once, before the first step.

The order of departure is that of the parameter list, last parameter first, which is about the order in which backward
finishes. It never depends on arrival, so all ranks issue the same collectives in the same order (Li et al., PyTorch
Distributed, 2020).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from unisono.comm.bucket import AT_ONCE, CAP_BYTES, Bucket, deal, nbytes_of
from unisono.comm.device import is_apart
from unisono.comm.group import Group
from unisono.parallel.params import Slot
from unisono.parallel.ties import Tie

WARM_BYTES = 256 << 10  # gradients that are copied together while they are in the CPU's second cache


@dataclass(frozen=True, slots=True)
class Departures:
    """The buckets of one rank. early: final as backward makes them. late: with a sum to wait for. partial: by the group
    that adds up their parts. joined: parameters of the last late bucket that no sum keeps waiting."""

    early: Sequence[Bucket] = ()
    late: Sequence[Bucket] = ()
    partial: Sequence[tuple[Group, Sequence[Bucket]]] = ()
    joined: Sequence[nn.Parameter] = ()

    def arrivals(self) -> Iterator[tuple[nn.Parameter, Bucket, slice | None]]:
        """(parameter, bucket, the part of the bucket that is there with its gradient, if one is)."""
        for bucket in self.early:
            ends = {part.stop - 1: part for part in pieces(bucket.params)}
            yield from ((p, bucket, ends.get(i)) for i, p in enumerate(bucket.params))
        for part in pieces(self.joined):
            yield self.joined[part.stop - 1], self.late[0], part


def departures(
    slots: Sequence[Slot],
    ties: Sequence[Tie],
    dp: Group,
    inner: Callable[[frozenset[str]], Group] | None,
    leafwise: bool,
    cap: int = 0,
    sliced: bool = False,
) -> Departures:
    """Sort all gradients of this rank into buckets. leafwise: sums wait for the tree over the leaves, so none leaves
    early. cap: the most bytes of a bucket between hosts, 0: of no matter. sliced: see `Sync`. Every member of `dp`
    calls it, or it hangs."""
    twins = [slot for tie in ties if len(tie.here) == 2 for slot in tie.here]
    partial: dict[frozenset[str], list[nn.Parameter]] = defaultdict(list)
    early, late = [], []
    for slot in slots:
        if slot.sparse:
            continue  # see `train.step.rows`
        is_twin = any(slot is twin for twin in twins)
        if slot.alias and is_twin and not leafwise:
            continue  # travels with its owner
        if slot.sum_over:
            partial[slot.sum_over].append(slot.master)
        elif leafwise or slot.master is not slot.live or is_twin:
            late.append(slot.master)
        else:
            early.append(slot.live)
    # Gradients that are added up in memory use the CPU cores that backward needs. So such a sum starts when backward
    # ends, and one bucket is enough.
    near = not sliced and not leafwise and slots and dp.near(slots[0].master.device)
    cap = AT_ONCE if near else cap or CAP_BYTES

    def buckets(runs: Iterable[Sequence[nn.Parameter]]) -> list[Bucket]:
        over = None if leafwise or dp.size == 1 or sliced else dp
        return [Bucket(run, dp.size, over) for run in runs]

    parts = []
    if inner is not None:
        parts = [(inner(axes), buckets(deal(partial[axes], cap))) for axes in sorted(partial, key=sorted)]
    if dp.size == 1:
        return Departures(partial=parts)
    runs, late_runs, joined = deal(early, cap), deal(late, cap), []
    if runs and len(late_runs) == 1:
        # The last early bucket would fill only as backward ends: beside the late ones it saves a collective.
        both = [*runs[-1], *late_runs[0]]
        if len({p.grad_dtype for p in both}) == 1 and sum(map(nbytes_of, both)) <= cap:
            joined, late_runs = runs.pop(), [both]
    return Departures(buckets(runs), buckets(late_runs), parts, joined)


def pieces(params: Sequence[nn.Parameter]) -> list[slice]:
    """Runs of `params` of about `WARM_BYTES` each on a CPU; a GPU keeps none warm, and takes them all at once."""
    if params and is_apart(params[0]):
        return [slice(0, len(params))]
    parts: list[slice] = []
    begun, nbytes = 0, 0
    for i, p in enumerate(params):
        nbytes += nbytes_of(p)
        if nbytes >= WARM_BYTES or i == len(params) - 1:
            parts.append(slice(begun, i + 1))
            begun, nbytes = i + 1, 0
    return parts
