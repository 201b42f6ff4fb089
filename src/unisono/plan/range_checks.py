"""What a plan's ranges of blocks may not say: the part of `Plan.check` about `blocks`."""

from collections.abc import Iterator
from typing import Any

from unisono.plan.away import away_in, away_of
from unisono.plan.grammar import member, problem_of
from unisono.plan.grid import Grid
from unisono.plan.keys import PlanKeys
from unisono.plan.ranges import Range, ranges_of
from unisono.spec.errors import Problem

_WHERE = "plan.blocks"


def ranged(plan: PlanKeys, recipe: Any) -> Iterator[Problem]:
    """All problems of all ranges, those of the plan alone first."""
    ranges = ranges_of(plan.blocks)
    for one in ranges:
        yield from _dealt(plan, one)
    if recipe is None:
        return
    for one in ranges:
        yield from _fitting(one, recipe.model)
        yield from _whole(plan, one, recipe.model)
        yield from _away(plan, one, getattr(recipe.train, "compile", False))
    places = {away.on_disk for away in (away_of(plan), *_aways(ranges)) if away}
    if len(places) > 1:
        what = f"blocks={plan.blocks} with offload={plan.offload}: some lie on disk and some in the host's memory"
        yield Problem("P22", what, f"{_WHERE}, plan.offload", "to=disk behind all of them, or behind none")


def _aways(ranges: tuple[Range, ...]) -> "Iterator[Any]":
    yield from (away_in(text) for one in ranges if (text := one.says("offload")) is not None)


def _dealt(plan: PlanKeys, one: Range) -> Iterator[Problem]:
    """Of axes that the plan has not."""
    zero = one.says("zero")
    if zero is not None and plan.shard == 1:
        what = f"blocks={one}: zero={zero} with shard=1, which deals nothing out"
        yield Problem("P16", what, f"{_WHERE}, plan.shard", "shard=2, or leave zero out of the range")
    if one.says("tp") is None:
        return
    virtual = getattr(_member(plan), "virtual", 1)
    if plan.tp == 1:
        what = f"blocks={one}: tp=1 is what the plan's other blocks have too"
        yield Problem("P16", what, f"{_WHERE}, plan.tp", "tp=2, or leave tp out of the range")
    elif isinstance(plan.tp, Grid) or virtual > 1:
        other = f"tp={plan.tp}" if isinstance(plan.tp, Grid) else f"sync={plan.sync}"
        what = f"blocks={one}: blocks that tp leaves whole, beside {other}"
        yield Problem("P12", what, f"{_WHERE}, plan.tp", "tp=N in one row, without virtual shards")


def _member(plan: PlanKeys) -> Any:
    return None if problem_of("sync", plan.sync) else member("sync", plan.sync)


def _fitting(one: Range, model: Any) -> Iterator[Problem]:
    """Numbers and words that the model has not."""
    depth = model.depth
    if depth is not None and one.last >= depth:
        what = f"blocks={one} names block {one.last}, and the model has {depth}, from 0 on"
        yield Problem("P25", what, f"{_WHERE}, {model.depth_key}", f"numbers up to {depth - 1}")
    if one.says("recompute") == "selective" and not getattr(model, "selective", True):
        what = f"blocks={one}: a {model.kind} has no part that is dear to keep and quickly computed again"
        yield Problem(
            "P17", what, f"{_WHERE}, model.kind", "recompute=full, which computes whole blocks again"
        )


def _whole(plan: PlanKeys, one: Range, model: Any) -> Iterator[Problem]:
    """Blocks that tp leaves whole see some positions, so they have to attend to those of other ranks."""
    if one.says("tp") is None or plan.tp == 1:
        return
    positions, *_ = model.deals("cp") or (None,)
    if positions is None or model.deals("ep") is not None:
        what = f"blocks={one}: blocks of a {model.kind} cannot be left whole, each rank with some positions"
        yield Problem("P12", what, f"{_WHERE}, model.kind", "leave tp out of the range")
    elif positions.size % (plan.tp * plan.cp):
        what = f"blocks={one}: {positions.what} {positions.size} is not dealt evenly over {plan.cp * plan.tp} ranks"
        yield Problem("P12", what, f"{_WHERE}, {positions.key}", f"a multiple of {plan.cp * plan.tp}")


def _away(plan: PlanKeys, one: Range, compiled: bool) -> Iterator[Problem]:
    """As of the plan's own `offload`."""
    text = one.says("offload")
    away = away_in(text or "none")
    rounded = plan.wires.gather or plan.arithmetic.params or plan.arithmetic.stochastic
    if away.params and plan.shard > 1:
        what = f"blocks={one} with shard={plan.shard}: weights that are dealt out stay with their ranks"
        yield Problem("P22", what, f"{_WHERE}, plan.shard", "offload=optimizer beside zero=3")
    if (away.params or away.activations) and compiled:
        what = f"blocks={one} with train.compile: compiled blocks keep what they keep themselves"
        yield Problem("P22", what, f"{_WHERE}, train.compile", "--train.compile false, or offload=optimizer")
    if away.params and rounded:
        what = f"blocks={one} with {' '.join(sorted(plan.options))}: what is put away is not rounded"
        yield Problem(
            "P22", what, f"{_WHERE}, plan", "offload=optimizer, or precision and zero without options"
        )
