"""What the meshes of one search share: what is combined on each, and the arrays that its screens are made of.

What needs kernels depends on few keys (tp, cp, micro-batch, recompute): `transformers.kernels` says it once for each.

Axes of the arrays, in this order: zero, mode (recompute), size (micro-batch), kind (cp_kind), schedule. Where a
quantity does not depend on an axis, its length there is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from unisono.plan import Plan
from unisono.planner.cuts import rows_of
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import stride
from unisono.planner.memory import Kept, RowShare, kept_of, share_of
from unisono.planner.price_parts import Blocks, Kernels, Totals
from unisono.planner.stack import Stack
from unisono.planner.timetables import ends, in_flight, of, serves
from unisono.planner.transformers import blocks, kernels
from unisono.planner.work.transformer import Transformer

Array = Any  # of float64: the stubs of numpy do not follow shapes, and formulas are written for floats

_FIELDS = tuple(f.name for f in fields(Plan))
_VALUES, _SETTERS = attrgetter(*_FIELDS), [(name, getattr(Plan, name).__set__) for name in _FIELDS]


@dataclass(frozen=True, slots=True)
class Axes:
    """What is combined on one mesh. sizes: micro-batches and how many of them a step has."""

    zeros: tuple[int, ...]
    modes: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]
    schedules: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(part) for part in (self.zeros, self.modes, self.sizes, self.kinds, self.schedules))

    def served(self, ranks: int, n_layer: int) -> Array:
        """(sizes, schedules): which timetables exist for which numbers of micro-batches."""
        return _served(self.schedules, tuple(m for _, m in self.sizes), ranks, n_layer)


@dataclass(slots=True)
class Memo:
    """What the meshes of one search share: kernels, shares of rows, what is held."""

    kernels: dict[Any, Kernels] = field(default_factory=dict)
    totals: dict[Any, Totals] = field(default_factory=dict)
    kept: dict[Any, Kept] = field(default_factory=dict)
    shares: dict[Any, RowShare] = field(default_factory=dict)
    held: dict[Any, Array] = field(default_factory=dict)
    layouts: dict[Any, tuple[tuple[float, float, float, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchShared:
    """What is the same for all plans of a search."""

    model: Transformer
    cluster: Cluster
    stack: Stack
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)


@lru_cache(maxsize=4096)
def _served(schedules: tuple[str, ...], micros: tuple[int, ...], ranks: int, n_layer: int) -> Array:
    """Many meshes of one search ask the same."""
    return np.array([[serves(name, ranks, many, n_layer) for name in schedules] for many in micros], bool)


def array(values: Any, *shape: int) -> Array:
    """Return an array of floats, from numbers or arrays."""
    floats = np.array(values, float)
    return floats.reshape(shape) if shape else floats


def like(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values, which are known to be of the contract and not looked at again."""
    copy = object.__new__(Plan)
    for (key, put), value in zip(_SETTERS, _VALUES(plan), strict=True):
        put(copy, changes.get(key, value))
    return copy


def totals_by(bench: SearchShared, mesh: Plan, axes: Axes) -> Totals:
    """Kernels of all modes, sizes and kinds: arrays (1, mode, size, kind)."""
    sizes = tuple(b for b, _ in axes.sizes)
    key = (*_inside(bench, mesh), covers(mesh), axes.modes, sizes, axes.kinds)
    if key not in bench.memo.totals:
        each = [
            kernels_of(bench, like(mesh, recompute=mode, cp_kind=kind), size).totals
            for mode in axes.modes
            for size in sizes
            for kind in axes.kinds
        ]
        shape = (1, len(axes.modes), len(sizes), len(axes.kinds))

        def field_of(name: str, way: int | None = None) -> Array:
            values = [getattr(t, name) if way is None else getattr(t, name)[way] for t in each]
            return array(values, *shape)

        bench.memo.totals[key] = Totals(
            field_of("ahead"),
            field_of("back"),
            (field_of("stem", 0), field_of("stem", 1)),
            (field_of("head", 0), field_of("head", 1)),
        )
    return bench.memo.totals[key]


def _inside(bench: SearchShared, plan: Plan) -> tuple[int, ...]:
    """Ranks that share a block, and how far apart they lie, which other axes decide in other orders than the usual."""
    order = bench.cluster.order
    return plan.tp, plan.cp, plan.ep, *(stride(plan, axis, order) for axis in ("tp", "cp", "ep"))


def covers(plan: Plan, schedule: str = "") -> bool:
    """Whether its timetable, or another one, hides what ep sends behind another micro-batch."""
    return plan.ep > 1 and of(schedule or plan.schedule).overlapped


def kernels_of(bench: SearchShared, plan: Plan, size: int) -> Kernels:
    key = (*_inside(bench, plan), covers(plan), plan.cp_kind, plan.recompute, size)
    if key not in bench.memo.kernels:
        bench.memo.kernels[key] = kernels(bench.model, plan, bench.cluster, bench.stack, size)
    return bench.memo.kernels[key]


def kept_by(bench: SearchShared, mesh: Plan, axes: Axes) -> Kept:
    """Bytes that one micro-batch keeps: arrays (mode, size, kind, 1)."""
    sizes = tuple(b for b, _ in axes.sizes)
    key = (mesh.tp, mesh.cp, mesh.ep, axes.modes, sizes, axes.kinds)
    if key not in bench.memo.kept:
        each = [
            kept_of(bench.model, like(mesh, recompute=mode, cp_kind=kind), bench.stack, size)
            for mode in axes.modes
            for size in sizes
            for kind in axes.kinds
        ]
        names = tuple(f.name for f in fields(Kept))
        shape = (len(axes.modes), len(sizes), len(axes.kinds), 1)
        bench.memo.kept[key] = Kept(*(array([getattr(k, n) for k in each], *shape) for n in names))
    return bench.memo.kept[key]


def share_by(bench: SearchShared, mesh: Plan, axes: Axes, row: int) -> RowShare:
    """A row's share under each timetable: arrays (schedule,)."""
    key = (
        mesh.tp,
        mesh.pp,
        mesh.ep,
        row,
        axes.schedules,
        (mesh.cp, mesh.shard) if bench.model.experts else (),
    )
    if key not in bench.memo.shares:
        each = [
            share_of(bench.model, like(mesh, schedule=name), row, bench.stack.balanced)
            for name in axes.schedules
        ]
        names = [f.name for f in fields(RowShare) if f.name not in ("ranks", "apart")]
        parts = {n: array([getattr(s, n) for s in each]) for n in names}
        bench.memo.shares[key] = RowShare(**parts, ranks=each[0].ranks)
    return bench.memo.shares[key]


def held_by(bench: SearchShared, mesh: Plan, axes: Axes, row: int) -> Array:
    """Micro-batches in flight: (size, 1, schedule)."""
    micros = tuple(m for _, m in axes.sizes)
    key = (row, mesh.pp, micros, axes.schedules)
    if key not in bench.memo.held:
        column = array(micros)
        each = [np.broadcast_to(in_flight(s, row, mesh.pp, column), column.shape) for s in axes.schedules]
        bench.memo.held[key] = np.stack(each, axis=-1)[:, None, :]
    return bench.memo.held[key]


def layout_of(bench: SearchShared, mesh: Plan, schedule: str) -> tuple[tuple[float, float, float, int], ...]:
    """Kinds of rows: (blocks, share of the stem, of the head, how many such rows)."""
    known, key = bench.memo.layouts, (schedule, mesh.pp)
    if key in known:
        return known[key]
    layers = rows_of(bench.model, schedule, mesh.pp, bench.stack.balanced)
    stems, heads = ends(schedule, mesh.pp)
    kinds: dict[tuple[float, float, float], int] = {}
    for row, count in enumerate(layers):
        kind = (count, (row in stems) / len(stems), (row in heads) / len(heads))
        kinds[kind] = kinds.get(kind, 0) + 1
    known[key] = tuple((*kind, many) for kind, many in kinds.items())
    return known[key]


def blocks_by(bench: SearchShared, mesh: Plan, axes: Axes) -> Blocks:
    """Blocks of all ways to shard: arrays (zero, mode, size, kind)."""
    totals, sizes = totals_by(bench, mesh, axes), array([b for b, _ in axes.sizes], -1, 1)
    variants = {
        whole: blocks(
            bench.model, like(mesh, zero=3 if whole else 1), bench.cluster, bench.stack, sizes, totals
        )
        for whole in {zero == 3 for zero in axes.zeros}
    }
    each = [variants[zero == 3] for zero in axes.zeros]
    shape = (1, len(axes.modes), len(axes.sizes), len(axes.kinds))

    def stacked(parts: Sequence[Any]) -> Array:
        return np.concatenate([np.broadcast_to(part, shape) for part in parts])

    def named(name: str) -> Array:
        return stacked([getattr(variant, name) for variant in each])

    def both(name: str) -> tuple[Any, Any]:
        pairs = [getattr(variant, name) for variant in each]
        return stacked([pair[0] for pair in pairs]), stacked([pair[1] for pair in pairs])

    return Blocks(named("forward"), named("backward"), both("stem"), both("head"), named("send"))
