"""A step's pipeline by event simulation: the very timetable that `programs` makes, with each row's own seconds.

A message keeps both of its rows, as the closed form has it and as blocking sends do; so it is part of the computation
that waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from unisono.planner.cuts import shares
from unisono.planner.machines.chip import Traffic
from unisono.planner.price_parts import Price, Rows
from unisono.planner.timetables import chunks, ends, of, serves
from unisono.programs.pipeline import Timetable, play_rows
from unisono.programs.schedules import Schedule, Unflushed

FEW = 20_000  # actions up to which a timetable is played whole


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one stage and micro-batch, by stage of the timetable: forward; backward, all of it or, where the
    timetable splits it, towards the input; and towards the weights."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]


@lru_cache(maxsize=1024)
def span(schedule: str, n_layer: int, micros: int, each: Rows) -> float | None:
    """Seconds from the first start to the last stop, of zero-bubble timetables of the slowest row's own; None where
    there is no such timetable.

    Of many micro-batches as many are played as the pipeline takes to come into its stride, and a round more; what the
    round adds, each further one adds too.
    """
    ranks = len(each.forward)
    if ranks == 1 or not serves(schedule, ranks, micros, n_layer):
        return None
    if actions(schedule, ranks, micros) <= FEW or micros <= 4 * ranks:
        return _span(schedule, micros, each)
    few, more = (_span(schedule, rounds * ranks, each) for rounds in (3, 4))
    return more + (micros - 4 * ranks) * (more - few) / ranks


def actions(schedule: str, ranks: int, micros: int) -> int:
    """Computations of a timetable."""
    return (3 if of(schedule).halves else 2) * ranks * micros * chunks(schedule)


def with_play(got: Price, whole: float, micros: int, schedule: str, each: Rows) -> Price:
    """The price with what was played in place of the closed form: the bubble, and the messages of a row."""
    sent = 2 * each.send * micros * chunks(schedule)
    idle = max(0.0, whole - got.busiest - sent)
    pp = got.comm["pp"]
    beside = pp.exposed - 2 * each.send * (micros * chunks(schedule) + len(each.forward) - 1)  # tied weights
    exposed = sent + max(0.0, beside)
    comm = got.comm | {"pp": Traffic(pp.bytes, exposed, exposed)}
    return replace(got, step=got.step + idle - got.idle + exposed - pp.exposed, idle=idle, comm=comm)


def _span(schedule: str, micros: int, each: Rows) -> float:
    named, ranks = of(schedule), len(each.forward)
    if isinstance(
        named, Unflushed
    ):  # what a further step adds; the pipeline is filled and emptied once for many
        few, more = (
            _length(schedule, named.flow(ranks, micros, steps), each) for steps in (ranks, ranks + 1)
        )
        return more - few
    return _length(schedule, timetable_of(schedule, ranks, micros), each)


def _length(schedule: str, timetable: Timetable, each: Rows) -> float:
    rows = play_rows(timetable, *costs(schedule, timetable, each))
    return max(row[-1][1] - (row[0][0] if timetable.splits_backward else 0.0) for row in rows)


def costs(
    schedule: str, timetable: Timetable, each: Rows
) -> tuple[Sequence[float], Sequence[float], float, Sequence[float], float | None]:
    """What `play_rows` and `play_costs` are given: seconds of each stage, of what lies between two, of pairs."""
    parts, together = stages(schedule, timetable, each), None
    if timetable.overlapped:
        # One number for all rows: the dearest's, which sets the pace.
        together = max(
            (f + b) / chunks(schedule) + 2 * each.message(row)
            for row, (f, b) in enumerate(zip(each.forward, each.backward, strict=True))
        )
    return parts.forward, parts.backward, 0.0, parts.weight, together


def timetable_of(schedule: str, ranks: int, micros: int) -> Timetable:
    """The timetable that a run plays, which is the same however blocks are cut."""
    return _cached_timetable(of(schedule).model_copy(update={"cut": ""}), ranks, micros)  # type: ignore[arg-type]  # frozen


@lru_cache(maxsize=64)
def _cached_timetable(schedule: Schedule, ranks: int, micros: int) -> Timetable:
    """Plans that a search plays after each other often have the same one."""
    return schedule.timetable(ranks, micros)


def stages(schedule: str, timetable: Timetable, each: Rows) -> Parts:
    """A row's blocks shared by its stages as the plan cuts them, else evenly; stem and head where the first and last
    stage are; its messages with what waits for them."""
    ranks = len(each.forward)
    parted, (stems, heads) = shares(schedule, ranks), ends(schedule, ranks)
    split = timetable.splits_backward  # which reads all of its actions
    parts: list[tuple[float, float, float]] = []
    for stage, row in enumerate(timetable.placement):
        place = stage % timetable.length
        # Of the row's mean over micro-batches to what this stage takes.
        stem = (place == 0) - (row in stems) / len(stems) * parted[stage]
        head = (place == timetable.length - 1) - (row in heads) / len(heads) * parted[stage]
        f = each.forward[row] * parted[stage] + stem * each.stem[0] + head * each.head[0]
        b = each.backward[row] * parted[stage] + stem * each.stem[1] + head * each.head[1]
        # Towards the weights a backward pass has the forward pass's products.
        w, send = min(f, b / 2) if split else 0.0, each.message(row)
        parts.append((f + send, b - w + send, w))
    forward, backward, weight = zip(*parts, strict=True)
    return Parts(forward, backward, weight)
