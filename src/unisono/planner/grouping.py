"""Groups of blocks that are played alike. Each group is named by the plan that would play all blocks of the model so.

A block whose weights `tp` leaves whole belongs to a plan without `tp`, in which the same ranks split positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from unisono.plan import Plan
from unisono.plan.blocks import BlockOptions, offload_text, options_of
from unisono.plan.fields import ALIKE
from unisono.plan.grammar import choice
from unisono.planner.cuts import stages_of
from unisono.planner.timetables import chunks, of
from unisono.planner.work.transformer import Transformer


class Alike(NamedTuple):
    """A number of blocks, and the plan that plays all blocks as these are played."""

    plan: Plan
    blocks: float


def is_uniform(plan: Plan) -> bool:
    """Whether all blocks are played the same way."""
    return plan.blocks == ALIKE and not choice(plan.recompute).options


@lru_cache(maxsize=4096)
def in_rows(model: Transformer, plan: Plan, layers: tuple[float, ...]) -> tuple[tuple[Alike, ...], ...]:
    """Return the groups of each row of the pipeline, for one micro-batch. layers: blocks of each row."""
    if is_uniform(plan):
        return tuple((Alike(plan, count),) for count in layers)
    cuts, numbers = _numbers(model, plan, layers)
    each = options_of(plan, cuts)
    return tuple(
        _kinds(plan, [each[n] for n in row_numbers], count)
        for row_numbers, count in zip(numbers, layers, strict=True)
    )


def numbers_of(
    model: Transformer, plan: Plan, layers: tuple[float, ...] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the block numbers of each row, in the order of the forward pass. layers: blocks of each row, if not as
    the program cuts."""
    return _numbers(model, plan, layers)[1]


def stages_in(
    model: Transformer, plan: Plan, layers: tuple[float, ...] | None = None
) -> tuple[list[list[int]], list[int]]:
    """(stages of each row, in the order in which forward passes meet them; blocks of each stage). layers: as above."""
    cuts = _numbers(model, plan, layers)[0]
    rows: list[list[int]] = [[] for _ in range(plan.pp)]
    for stage, row in enumerate(of(plan.schedule).placement(plan.pp)):
        rows[row].append(stage % len(cuts))
    return rows, [len(cut) for cut in cuts]


def _numbers(
    model: Transformer, plan: Plan, layers: tuple[float, ...] | None
) -> tuple[tuple[range, ...], tuple[tuple[int, ...], ...]]:
    """(blocks of each stage, of each row)."""
    if layers is not None and chunks(plan.schedule) == 1 and of(plan.schedule).chains == 1:
        cuts = _cuts([int(count) for count in layers])
        return cuts, tuple(map(tuple, cuts))
    cuts = _cuts(stages_of(model, plan.schedule, plan.pp))
    rows: list[list[int]] = [[] for _ in range(plan.pp)]
    for stage, row in enumerate(of(plan.schedule).placement(plan.pp)):
        rows[row] += cuts[stage % len(cuts)]
    return cuts, tuple(map(tuple, rows))


@lru_cache(maxsize=4096)
def in_order(model: Transformer, plan: Plan, row: int) -> tuple[Plan, ...]:
    """Return, for each block of a row in order, the plan that plays all blocks as it is played."""
    cuts, rows = _numbers(model, plan, None)
    each = options_of(plan, cuts)
    return tuple(as_plan(plan, each[n]) for n in rows[row])


def again_in_words(model: Transformer, plan: Plan, layers: tuple[float, ...] | None = None) -> str:
    """How many of the model's blocks are computed again, as `12 full, 20 selective of 32 blocks`."""
    modes = [options.recompute for options in options_of(plan, _numbers(model, plan, layers)[0])]
    said = [f"{modes.count(mode)} {mode}" for mode in ("full", "selective") if mode in modes]
    return f"{', '.join(said) or 'none'} of {len(modes)} blocks"


def together(rows: Iterable[Sequence[Alike]]) -> tuple[Alike, ...]:
    """Merge the groups of all rows."""
    blocks: dict[Plan, float] = {}
    for alike in (alike for row in rows for alike in row):
        blocks[alike.plan] = blocks.get(alike.plan, 0.0) + alike.blocks
    return tuple(Alike(*pair) for pair in blocks.items())


def _cuts(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))


def _kinds(plan: Plan, options: Sequence[BlockOptions], blocks: float) -> tuple[Alike, ...]:
    """`some` blocks stand for so many."""
    many: dict[BlockOptions, int] = {}
    for option in options:
        many[option] = many.get(option, 0) + 1
    return tuple(Alike(as_plan(plan, option), blocks * n / len(options)) for option, n in many.items())


def as_dealt(plan: Plan, zero: int) -> Plan:
    """Return the plan with another `zero`; the options of its own stay."""
    wires = str(plan.text("zero")).partition(":")[2]
    return replace(plan, zero=f"{zero}:{wires}" if wires else zero)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def as_plan(plan: Plan, options: BlockOptions) -> Plan:
    """The plan that plays every block so."""
    away = offload_text(options.away)
    uniform = replace(as_dealt(plan, options.zero), blocks=ALIKE, recompute=options.recompute, offload=away)
    return replace(uniform, tp=1, cp=plan.cp * plan.tp, cp_kind="gather") if options.whole else uniform
