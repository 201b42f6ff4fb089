"""What each stage of the pipeline has: how many blocks, and of how many it computes the scores again, or all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster
from unisono.planner.priced import Model, blocks
from unisono.planner.stack import Stack
from unisono.planner.timetables import chunks

_WORDS = {"full": "full", "selective": "selective (attention's scores)"}


@dataclass(frozen=True, slots=True)
class RowLoad:
    """One row of the pipeline; of rows with several stages all of them together. selective, full: of its blocks, those
    that are computed again."""

    blocks: float
    selective: float = 0.0
    full: float = 0.0


def told(model: Model, plan: Plan, stack: Stack, cluster: Cluster) -> tuple[RowLoad, ...]:
    """Of each row of the pipeline."""
    return tuple(
        RowLoad(count, count * (plan.recompute == "selective"), count * (plan.recompute == "full"))
        for count in blocks(model, plan, stack, cluster)
    )


def as_json(each: Sequence[RowLoad]) -> list[Mapping[str, Any]]:
    return [
        {"stage": row, "blocks": one.blocks, "recompute": {"selective": one.selective, "full": one.full}}
        for row, one in enumerate(each)
    ]


def as_lines(plan: Plan, each: Sequence[RowLoad]) -> list[str]:
    """Lines of the page: how the model is cut where there are stages, and what is computed again where anything is."""
    lines: list[str] = []
    if len(each) > 1:
        lines.append(f"stages     {_cut(plan, each)}")
    if plan.recompute == "auto":
        lines.append(f"recompute  {sentence(plan, each)}")
    return lines


def sentence(plan: Plan, each: Sequence[RowLoad]) -> str:
    """What is computed again, for example `full in 3 of 12 blocks of stage 0; none in the others`."""
    parts: list[str] = []
    for mode, word in _WORDS.items():
        where = [
            _some(one, getattr(one, mode), _rows(plan, rows, len(each)))
            for (one, rows) in _alike(each)
            if getattr(one, mode)
        ]
        if where:
            parts.append(f"{word} in {', '.join(where)}")
    if not parts:
        return "none: everything fits without"
    if any(not one.selective and not one.full for one in each):
        parts.append("none in the others")
    return "; ".join(parts)


def _alike(each: Sequence[RowLoad]) -> list[tuple[RowLoad, list[int]]]:
    """Neighbours that have and do the same."""
    grouped = groupby(enumerate(each), key=lambda pair: pair[1])
    return [(one, [row for row, _ in rows]) for one, rows in grouped]


def _some(one: RowLoad, count: float, where: str) -> str:
    if not where:
        return f"{count:g} of {one.blocks:g} blocks" if count < one.blocks else f"all {one.blocks:g} blocks"
    return (
        f"{count:g} of {one.blocks:g} blocks of {where}" if count < one.blocks else f"all blocks of {where}"
    )


def _rows(plan: Plan, rows: Sequence[int], of: int) -> str:
    """`stage 3`, `each of stages 2 to 5`, or nothing where there is but one."""
    if of == 1:
        return ""
    word = "stage" if chunks(plan.schedule) == 1 else "row"
    if len(rows) == 1:
        return f"{word} {rows[0]}"
    return f"each of {word}s {rows[0]} {'and' if len(rows) == 2 else 'to'} {rows[-1]}"


def _cut(plan: Plan, each: Sequence[RowLoad]) -> str:
    """How many blocks each stage has."""
    v, sizes = chunks(plan.schedule), [one.blocks for one in each]
    unit = f"rows of {v} stages" if v > 1 else "stages"
    if len(set(sizes)) == 1:
        return f"{len(each)} {unit}, {sizes[0]:g} blocks each"
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    listed = " ".join(f"{size:g}" if many == 1 else f"{many} x {size:g}" for size, many in runs)
    return f"{len(each)} {unit}, blocks: {listed}"
