"""The screen under recompute=auto: every row of the pipeline computes again what it needs, of many plans at once.

Arrays of one way (zero, offload) are (row, size, kind, schedule); what is handed on has the axes of `bench`.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from unisono.plan import Plan
from unisono.planner import recompute
from unisono.planner.bench import (
    Array,
    Axes,
    SearchShared,
    array,
    blocks_by,
    covers,
    held_by,
    kept_by,
    like,
    share_by,
)  # fmt: skip
from unisono.planner.block import COVERING
from unisono.planner.cuts import rows_of
from unisono.planner.memory import Again, Kept, RowShare, of_share
from unisono.planner.parts import Blocks, RowSeconds
from unisono.planner.timetables import ends


def auto(
    bench: SearchShared, mesh: Plan, axes: Axes, ways: Sequence[Plan]
) -> tuple[Array, Array, Callable[[int, Blocks], RowSeconds]]:
    """(bytes of the fullest rank, whether it fits, what the rows compute), of all axes but collective.

    axes: with the one mode, auto.
    """
    each = _three(bench, mesh, axes, ways)
    share, held = _shares(bench, mesh, axes), _held(bench, mesh, axes)
    one = kept_by(bench, mesh, axes)
    kept = Kept(*(array(getattr(one, f.name))[0][:, :, None] for f in fields(Kept)))
    device = bench.cluster.device
    totals: list[Array] = []
    fits: list[Array] = []
    agains: list[Again] = []
    shape = (mesh.pp, len(axes.sizes), len(axes.kinds), len(axes.schedules))
    for way, plan in enumerate(ways):
        given = (bench.model, plan, bench.stack, share, kept, held)
        extra = recompute.extra_of([forward[way] + backward[way] for forward, backward in each])
        again = recompute.of_rank(*given, device, extra)
        memory = of_share(*given, again)
        total, host = (np.broadcast_to(part, shape).max(axis=0) for part in (memory.total, memory.host))
        totals.append(total)
        fits.append((total <= device.room) & (host <= device.beside))
        agains.append(again)
    made = _worked(bench, mesh, axes, each, agains)
    return np.stack(totals)[:, None, ..., None], np.stack(fits)[:, None, ..., None], made


def _three(bench: SearchShared, mesh: Plan, axes: Axes, ways: Sequence[Plan]) -> list[tuple[Array, Array]]:
    """Seconds of one block, forward and backward, under each way to recompute: arrays (way, size, kind, schedule)."""
    three = replace(axes, modes=recompute.MODES)
    covered = [covers(like(mesh, schedule=name)) for name in axes.schedules]
    made = {
        which: blocks_by(bench, like(mesh, schedule=COVERING[0] if which else "1f1b"), three, ways)
        for which in set(covered)
    }

    def stacked(name: str) -> Array:
        if len(made) == 1:
            return array(getattr(made[covered[0]], name))[..., None]
        return np.stack([getattr(made[which], name) for which in covered], axis=-1)

    forward, backward = stacked("forward"), stacked("backward")
    return [(forward[:, mode], backward[:, mode]) for mode in range(3)]


def _shares(bench: SearchShared, mesh: Plan, axes: Axes) -> RowShare:
    """Of all rows: arrays (row, 1, 1, schedule)."""
    rows = [share_by(bench, mesh, axes, row) for row in range(mesh.pp)]
    names = [f.name for f in fields(RowShare) if f.name != "ranks"]
    parts: list[Array] = [np.stack([getattr(row, name) for row in rows])[:, None, None, :] for name in names]
    return RowShare(*parts, ranks=rows[0].ranks)


def _held(bench: SearchShared, mesh: Plan, axes: Axes) -> Array:
    """(row, size, 1, schedule)"""
    return np.stack([held_by(bench, mesh, axes, row) for row in range(mesh.pp)])[:, :, None, :]


def _worked(
    bench: SearchShared, mesh: Plan, axes: Axes, each: Sequence[tuple[Array, Array]], agains: Sequence[Again]
) -> Callable[[int, Blocks], RowSeconds]:
    """(place of a timetable, blocks) -> what its rows compute."""
    shape = (mesh.pp, len(axes.sizes), len(axes.kinds), len(axes.schedules))

    def counts(name: str) -> Array:
        return np.stack([np.broadcast_to(getattr(one, name), shape) for one in agains], axis=1)

    selective, full = counts("selective"), counts("full")  # (row, way, size, kind, schedule)

    def found(at: int, blocks: Blocks) -> RowSeconds:
        name = axes.schedules[at]
        stems, heads = ends(name, mesh.pp)
        rows = range(mesh.pp)
        layers = _column(rows_of(bench.model, name, mesh.pp, bench.stack.balanced))
        stem = _column([(row in stems) / len(stems) for row in rows])
        head = _column([(row in heads) / len(heads) for row in rows])
        some, all_ = selective[..., at], full[..., at]
        place = at if each[0][0].shape[-1] > 1 else 0
        passes: list[Array] = []
        for way in (0, 1):
            none, partly, whole = (mode[way][..., place] for mode in each)
            own = (layers - some - all_) * none + some * partly + all_ * whole
            ends_ = stem * array(blocks.stem[way])[:, 0] + head * array(blocks.head[way])[:, 0]
            passes.append(own + ends_)
        f, b = passes
        parts = ((f + b).max(axis=0), b.min(axis=0), f.sum(axis=0), b.sum(axis=0))
        return RowSeconds(*(part[:, None] for part in parts))

    return found


def _column(values: Sequence[float] | Any) -> Array:
    return array(values, -1, 1, 1, 1)
