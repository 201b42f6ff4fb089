"""recompute=auto: of how many blocks of each pipeline row the scores, or all, are computed again, so that it just fits.

Rows differ: under 1F1B the first holds as many micro-batches as there are stages, the last one. Systems leave the
numbers to their user (Korthikanti et al., 2022, section 5; Megatron's block-wise recomputation). Here each row takes
what costs it fewest seconds, which also makes the step shortest: no row waits less because another computes more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.plan import Plan
from unisono.planner.machines.cluster import Device
from unisono.planner.memory import Again, Kept, RowShare, kept_of, of_share, share_of
from unisono.planner.numbers import either, larger, largest, smaller, whole
from unisono.planner.stack import Stack
from unisono.planner.timetables import in_flight
from unisono.planner.work.transformer import Transformer

MODES = ("none", "selective", "full")
_TINY = 1e-12  # what rounding may add to a quotient, and a byte that is none


@dataclass(frozen=True, slots=True)
class Extra:
    """Seconds that one block and micro-batch take beyond recompute=none. Numbers, or arrays."""

    selective: float
    full: float


def extra_of(seconds: Sequence[float]) -> Extra:
    """seconds: of one block and micro-batch, both passes, under each of `MODES`."""
    none, selective, full = seconds
    return Extra(selective - none, full - none)


def chosen(
    model: Transformer,
    plan: Plan,
    stack: Stack,
    device: Device,
    extra: Extra,
    *,
    micro_batch: int,
    micros: int,
) -> tuple[Again, ...]:
    """Of each row, under recompute=auto."""
    kept = kept_of(model, plan, stack, micro_batch)
    return tuple(
        of_rank(
            model, plan, stack, share_of(model, plan, row, stack.balanced), kept,
            in_flight(plan.schedule, row, plan.pp, micros), device, extra,
        )
        for row in range(plan.pp)
    )  # fmt: skip


def of_rank(
    model: Transformer, plan: Plan, stack: Stack, share: RowShare, kept: Kept, held: float, device: Device, extra: Extra
) -> Again:  # fmt: skip
    """What costs fewest seconds of all that fits; where nothing does, what needs least memory. Numbers, or arrays;
    of the plan only mesh, zero, precision and offload are read."""
    if plan.offload == "activations":
        return _alike(model, plan, stack, share, kept, held, device, extra)
    missing = (of_share(model, plan, stack, share, kept, held).total - device.room) / (1.0 + stack.slack)
    saved = Extra((kept.block - kept.partly) * held, (kept.block - kept.again) * held)
    return fewest(share.layers, missing, saved, Extra(kept.scores, kept.live), extra)


def fewest(layers: float, missing: float, saved: Extra, live: Extra, extra: Extra) -> Again:
    """The cheapest counts that save `missing` bytes. saved: bytes of one block; live: those that are there again as
    soon as one block's scores are computed again, or one whole block.

    Of the least possible number of whole blocks on, every further one takes the place of some whose scores alone are
    computed again. Where those cost less for each byte by more than rounding can take, the least number is best;
    elsewhere all are tried.
    """
    if largest(missing) <= 0.0:
        return Again(0.0 * missing, 0.0 * missing)
    some = missing > 0
    alone = _needed(missing + live.selective, saved.selective)
    every, fully = layers * saved.selective, layers * saved.full - live.full
    partly = every - live.selective
    # Of which number of whole blocks on there is enough.
    least = larger(1.0, _needed(missing + live.full - every, saved.full - saved.selective))
    start = either(alone <= layers, 0.0, smaller(least, layers))
    best, full, selective = float("inf"), start, 0.0 * start
    for more in range(_tried(layers, saved, extra)):
        count = smaller(start + more, layers)
        there = either(count > 0, live.full, live.selective)
        others = _needed(missing + there - count * saved.full, saved.selective)
        others = either(saved.selective > 0, others, 0.0)
        seconds = count * extra.full + smaller(others, layers - count) * extra.selective
        if more:
            seconds = either(others <= layers - count, seconds, float("inf"))
        better = seconds < best
        best, full = either(better, seconds, best), either(better, count, full)
        selective = either(better, smaller(others, layers - count), selective)
    # Where nothing fits: what saves most.
    helps = either(fully > partly, fully, partly) > 0
    enough = either(alone <= layers, 1.0, either(fully >= missing, 1.0, 0.0)) > 0
    all_full = either(enough, full, either(helps, either(fully > partly, layers, 0.0), 0.0))
    all_partly = either(enough, selective, either(helps, either(fully > partly, 0.0, layers), 0.0))
    return Again(either(some, all_partly, 0.0 * all_partly), either(some, all_full, 0.0 * all_full))


def _needed(missing: float, each: float) -> float:
    """How many times `each` makes up for what is missing, rounding on the safe side."""
    return larger(0.0, whole(missing / larger(each, _TINY) * (1.0 + _TINY)))


def _tried(layers: float, saved: Extra, extra: Extra) -> int:
    """How many numbers of whole blocks can be best."""
    pays = extra.full * saved.selective >= extra.selective * (saved.full + saved.selective)
    unsure = either(saved.selective > 0, either(pays, 0.0, 1.0), either(extra.full >= 0, 0.0, 1.0))
    return int(largest(layers)) + 1 if largest(unsure) else 1


def _alike(
    model: Transformer, plan: Plan, stack: Stack, share: RowShare, kept: Kept, held: float, device: Device,
    extra: Extra,
) -> Again:  # fmt: skip
    """Where activations are the host's, what is kept matters for the link: all blocks of a row are treated alike."""
    ways = (Again(), Again(share.layers, 0.0 * share.layers), Again(0.0 * share.layers, share.layers))
    found, over, best = ways[0], float("inf"), float("inf")
    for again, seconds in zip(ways, (0.0, extra.selective, extra.full), strict=True):
        memory = of_share(model, plan, stack, share, kept, held, again)
        short = larger(0.0, larger(memory.total - device.room, memory.host - device.beside))
        less = either(short < over, 1.0, either(short > over, 0.0, either(seconds < best, 1.0, 0.0))) > 0
        over, best = either(less, short, over), either(less, seconds, best)
        selective = either(less, again.selective, found.selective)
        found = Again(selective, either(less, again.full, found.full))
    return found
