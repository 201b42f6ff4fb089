"""What prices ask of a plan's schedule: what is held, what is idle, which row has what. Each schedule's file says it.

Numbers of micro-batches and seconds may be arrays.
"""

from functools import cache
from itertools import pairwise

from unisono.plan.grammar import choice, member
from unisono.programs.schedules import SCHEDULES, Schedule
from unisono.spec.numbers import smaller


@cache
def of(schedule: str) -> Schedule:
    """The schedule that a plan names. Raises UsageError."""
    return SCHEDULES.read(schedule)


@cache
def name_of(schedule: str) -> str:
    """Without its options."""
    return choice(schedule).name


@cache
def chunks(schedule: str) -> int:
    """Stages that one rank owns of the pipeline that one micro-batch passes."""
    named = of(schedule)
    return len(named.placement(2)) // 2 // named.chains


def copies(schedule: str, ranks: int = 2) -> float:
    """How often the model's weights are there."""
    return float(of(schedule).chains) if ranks > 1 else 1.0


@cache
def ends(schedule: str, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows that have the stem, rows that have the head)."""
    named = of(schedule)
    placement = named.placement(ranks)
    length = len(placement) // named.chains
    first, last = placement[::length], placement[length - 1 :: length]
    return tuple(sorted({*first})), tuple(sorted({*last}))


@cache
def handovers(schedule: str, ranks: int) -> int:
    """How often one micro-batch goes from a row to another on its way through the stages."""
    named = of(schedule)
    way = named.placement(ranks)[: len(named.placement(ranks)) // named.chains]
    return sum(here != there for here, there in pairwise(way))


def serves(schedule: str, ranks: int, micros: int, n_layer: int) -> bool:
    """Whether the timetable exists for these numbers: those that `programs` refuses have no price."""
    if member("schedule", schedule) is None:
        return False
    named = of(schedule)
    if ranks == 1:
        return chunks(schedule) == 1 and not named.halves
    bare = named.blocks.count(0)  # stages that are a stem or a head alone
    return ranks * chunks(schedule) <= n_layer + bare and not named.alone and named.serves(ranks, micros)


def in_flight(schedule: str, row: int, ranks: int, micros: float) -> float:
    """Micro-batches whose activations row `row` holds at its peak, each counted over all layers of the row. Where
    weight gradients come apart, activations are held until those are made."""
    named = of(schedule)
    if ranks == 1 and not named.heaped:
        return 1.0
    return smaller(named.held(row, ranks, micros), micros * 1.0)


def idle(schedule: str, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
    """Seconds of a step in which a row waits, given seconds of one micro-batch on one row; backward includes weight,
    the part of it that nobody waits for.

    Overlapped pairs take as long as their parts. The zero-bubble ones are counted between a row's own first start and
    last stop. Exact where weight is the least of the three parts and all rows cost the
    same; zbv also where a forward is no longer than the backward towards the input, and the DualPipes where all three
    parts are equal. Else no less than what is played; for the DualPipes with forwards no longer than the backward
    towards the input.
    """
    return of(schedule).idle(ranks, micros, forward, backward, weight) if ranks > 1 else 0.0 * forward
