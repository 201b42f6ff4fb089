"""Many plans priced at once: all combinations of the other keys on one mesh, as arrays.

What needs kernels depends on few keys (tp, cp, micro-batch, recompute): `price.kernels` says it once per combination.
The formulas that combine it are those of `price` and `memory` themselves, fed with arrays, so that a plan of the screen
costs what it costs alone.

Axes of the arrays, in this order: way (zero, offload), mode (recompute), size (micro-batch), kind (cp_kind), schedule,
collective. Where a quantity does not depend on an axis, its length there is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from unisono.plan import Plan
from unisono.planner import offload
from unisono.planner.cuts import rows_of
from unisono.planner.memory import Kept, Memory, Share, again_in, kept_of, of_share, rows_seen, share_of
from unisono.planner.price import (
    COVERING,
    Blocks,
    Kernels,
    Totals,
    blocks,
    kernels,
    line,
    met,
    row_seconds,
    tied,
    uncovered,
)
from unisono.planner.stack import Stack
from unisono.planner.timetables import ends, in_flight, name_of, serves
from unisono.spec.cluster import Cluster
from unisono.spec.transformer import Transformer

Array = Any  # of float64: the stubs of numpy do not follow shapes, and formulas are written for floats

_FIELDS = tuple(f.name for f in fields(Plan))


@dataclass(frozen=True, slots=True)
class Axes:
    """What is combined on one mesh. ways: (zero, offload). sizes: micro-batches and how many of them a step has."""

    ways: tuple[tuple[int, str], ...]
    modes: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]
    schedules: tuple[str, ...]
    collectives: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        parts = (self.ways, self.modes, self.sizes, self.kinds, self.schedules, self.collectives)
        return tuple(len(part) for part in parts)

    def served(self, ranks: int, n_layer: int) -> Array:
        """(sizes, schedules): which timetables exist for which numbers of micro-batches."""
        return np.array([[serves(s, ranks, m, n_layer) for s in self.schedules] for _, m in self.sizes], bool)


@dataclass(frozen=True, slots=True)
class Screened:
    """Seconds of a step, bytes of the fullest rank and which plans exist and fit; of all axes, memory of those that it
    depends on."""

    step: Array
    memory: Array
    fits: Array


@dataclass(slots=True)
class Memo:
    """What the meshes of one search share: kernels, shares of rows, what is held."""

    kernels: dict[Any, Kernels] = field(default_factory=dict)
    totals: dict[Any, Totals] = field(default_factory=dict)
    kept: dict[Any, Kept] = field(default_factory=dict)
    shares: dict[Any, Share] = field(default_factory=dict)
    held: dict[Any, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """What is the same for all plans of a search."""

    model: Transformer
    cluster: Cluster
    stack: Stack
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @property
    def capacity(self) -> float:
        return self.cluster.device.memory - self.cluster.device.reserved


def array(values: Any, *shape: int) -> Array:
    """Of floats; what it is made of may be arrays itself."""
    made = np.array(values, float)
    return made.reshape(shape) if shape else made


def like(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values, which are known to be of the contract and not looked at again."""
    made = object.__new__(Plan)
    for key in _FIELDS:
        object.__setattr__(made, key, changes[key] if key in changes else getattr(plan, key))
    return made


def screen(bench: Bench, mesh: Plan, axes: Axes) -> Screened:
    """All plans of one mesh. mesh: a plan with its sizes; the keys of the axes are not read."""
    ways = [like(mesh, zero=zero, offload=mode) for zero, mode in axes.ways]
    memory, fits, again = _memory(bench, mesh, axes, ways)
    served = axes.served(mesh.pp, bench.model.n_layer)[None, None, :, None, :, None]
    step = _steps(bench, mesh, axes, ways, again)
    return Screened(step, memory, fits & served)


def least_memory(bench: Bench, mesh: Plan, axes: Axes) -> float:
    """Bytes that the fullest rank needs at least: model states, by the way that shares out most of them."""
    nothing = Kept(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    zero = max(zero for zero, _ in axes.ways)
    modes = {mode for _, mode in axes.ways}
    best = like(mesh, zero=zero, offload=next((m for m in ("params", "optimizer") if m in modes), "none"))
    least = np.inf
    for schedule in axes.schedules:
        own, found = like(best, schedule=schedule), 0.0
        for row in rows_seen(mesh.pp):
            share = share_of(bench.model, own, row, bench.stack.balanced)
            got = of_share(bench.model, own, bench.stack, share, nothing, 0.0, 0.0)
            found = max(found, (got.params + got.grads + got.optim) * (1.0 + bench.stack.slack))
        least = min(least, found)
    return float(least)


def least_seconds(bench: Bench, mesh: Plan, axes: Axes) -> float:
    """Seconds that a step takes at least: kernels of a mean row, nothing computed again, nothing waited for."""
    plain = Axes(axes.ways[:1], ("none",), axes.sizes, axes.kinds, axes.schedules[:1], axes.collectives[:1])
    made = _totals(bench, mesh, plain)
    both = np.broadcast_to(made.ahead + made.back, (1, 1, len(axes.sizes), len(axes.kinds)))
    micros = np.array([m for _, m in axes.sizes], float)[:, None]
    ends_ = np.broadcast_to(sum(made.stem) + sum(made.head), both.shape)[0, 0]
    work = micros * (both[0, 0] * bench.model.n_layer + ends_) / mesh.pp
    return float(work.min()) + bench.stack.step


def _totals(bench: Bench, mesh: Plan, axes: Axes) -> Totals:
    """Kernels of all modes, sizes and kinds: arrays (1, mode, size, kind)."""
    sizes = tuple(b for b, _ in axes.sizes)
    key = (mesh.tp, mesh.cp, mesh.ep, _covers(mesh), axes.modes, sizes, axes.kinds)
    if key not in bench.memo.totals:
        each = [
            _kernels(bench, like(mesh, recompute=mode, cp_kind=kind), size).totals
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
            field_of("again"),
            (field_of("stem", 0), field_of("stem", 1)),
            (field_of("head", 0), field_of("head", 1)),
        )
    return bench.memo.totals[key]


def _covers(plan: Plan) -> bool:
    """Whether its timetable hides what ep sends behind another micro-batch."""
    return plan.ep > 1 and name_of(plan.schedule) in COVERING


def _kernels(bench: Bench, plan: Plan, size: int) -> Kernels:
    key = (plan.tp, plan.cp, plan.ep, _covers(plan), plan.cp_kind, plan.recompute, size)
    if key not in bench.memo.kernels:
        bench.memo.kernels[key] = kernels(bench.model, plan, bench.cluster, bench.stack, size)
    return bench.memo.kernels[key]


def _kept(bench: Bench, mesh: Plan, axes: Axes) -> Kept:
    """Bytes that one micro-batch keeps: arrays (mode, size, 1)."""
    sizes = tuple(b for b, _ in axes.sizes)
    key = (mesh.tp, mesh.cp, mesh.ep, axes.modes, sizes)
    if key not in bench.memo.kept:
        each = [
            kept_of(bench.model, like(mesh, recompute=mode), bench.stack, size)
            for mode in axes.modes
            for size in sizes
        ]
        names = ("block", "again", "live", "always", "stem", "head")
        shape = (len(axes.modes), len(sizes), 1)
        bench.memo.kept[key] = Kept(*(array([getattr(k, n) for k in each], *shape) for n in names))
    return bench.memo.kept[key]


def _share(bench: Bench, mesh: Plan, axes: Axes, row: int) -> Share:
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
        names = ("blocks", "ends", "layers", "stem", "head", "copies", "routed")
        parts = (array([getattr(s, n) for s in each]) for n in names)
        bench.memo.shares[key] = Share(*parts, ranks=each[0].ranks)
    return bench.memo.shares[key]


def _held(bench: Bench, mesh: Plan, axes: Axes, row: int) -> Array:
    """Micro-batches in flight: (size, schedule)."""
    micros = tuple(m for _, m in axes.sizes)
    key = (row, mesh.pp, micros, axes.schedules)
    if key not in bench.memo.held:
        column = array(micros)
        each = [np.broadcast_to(in_flight(s, row, mesh.pp, column), column.shape) for s in axes.schedules]
        bench.memo.held[key] = np.stack(each, axis=-1)
    return bench.memo.held[key]


def _memory(bench: Bench, mesh: Plan, axes: Axes, ways: Sequence[Plan]) -> tuple[Array, Array, Array]:
    """(bytes of the fullest rank, whether it fits, blocks that recompute=auto computes again), of all axes but kind
    and collective."""
    kept = _kept(bench, mesh, axes)
    rows = [(_share(bench, mesh, axes, r), _held(bench, mesh, axes, r)) for r in rows_seen(mesh.pp)]
    beside = bench.cluster.device.host_memory or np.inf
    shape = (len(axes.modes), len(axes.sizes), len(axes.schedules))
    auto = axes.modes.index("auto") if "auto" in axes.modes else None
    totals, fits, agains = [], [], []
    for plan in ways:
        again: Array = np.zeros(shape)
        if auto is not None:
            own = Kept(
                *(getattr(kept, n)[auto] for n in ("block", "again", "live", "always", "stem", "head"))
            )
            for share, held in rows:
                more = again_in(bench.model, plan, bench.stack, share, own, held, bench.capacity)
                again[auto] = np.maximum(again[auto], more)
        each = [of_share(bench.model, plan, bench.stack, share, kept, held, again) for share, held in rows]
        total, host = _fullest(each, shape)
        totals.append(total)
        fits.append((total <= bench.capacity) & (host <= beside))
        agains.append(again)

    def spread(found: list[Array]) -> Array:
        return np.stack(found)[:, :, :, None, :, None]

    return spread(totals), spread(fits), np.stack(agains)[:, :, :, None, :]


def _fullest(each: Sequence[Memory], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """(bytes of the fullest row, bytes that a rank keeps with its host at most)."""
    total, host = np.broadcast_to(each[0].total, shape), np.broadcast_to(each[0].host, shape)
    for memory in each[1:]:
        total, host = np.maximum(total, memory.total), np.maximum(host, memory.host)
    return total, host


def _steps(bench: Bench, mesh: Plan, axes: Axes, ways: Sequence[Plan], again: Array) -> Array:
    """Seconds of a step, of all axes."""
    plain = _blocks(bench, like(mesh, schedule="1f1b"), axes, ways)
    covered = plain
    if any(_covers(like(mesh, schedule=name)) for name in axes.schedules):
        covered = _blocks(bench, like(mesh, schedule=COVERING[0]), axes, ways)
    first = _share(bench, mesh, axes, 0)
    meeting = _meeting(bench, axes, ways, first)
    micros = array([m for _, m in axes.sizes], -1, 1)
    updates: list[Array] = [offload.update(plan, bench.cluster.device, bench.stack, first) for plan in ways]
    ties: list[Array] = [tied(bench.model, plan, bench.cluster, bench.stack, first) for plan in ways]
    fixed = bench.stack.step + bench.stack.micro * micros
    step = np.empty(axes.shape)
    lines: dict[Any, tuple[list[tuple[float, float]], list[int]]] = {}
    for at, name in enumerate(axes.schedules):
        more = again[..., at]
        layout = _layout(bench, mesh, name)
        each = covered if _covers(like(mesh, schedule=name)) else plain
        key = (layout, each is covered, name if more.any() else "")
        if key not in lines:
            kinds = [row_seconds(each, count, stem, head, more) for count, stem, head, _ in layout]
            lines[key] = kinds, [many for _, _, _, many in layout]
        whole = line(name, mesh.pp, micros, *lines[key], each.send)
        once = np.array(
            [u[at] + t[at] for u, t in zip(updates, _columns(ties, len(axes.schedules)), strict=True)]
        )
        alone = micros * whole.slowest + whole.idle + whole.messages + fixed + once[:, None, None, None]
        shown = uncovered(bench.stack, meeting[:, None, None, None, at], array(whole.cover)[..., None])
        step[..., at, :] = alone[..., None] + shown
    return step


def _columns(found: Sequence[Array], count: int) -> list[Array]:
    return [np.broadcast_to(one, (count,)) for one in found]


def _layout(bench: Bench, mesh: Plan, schedule: str) -> tuple[tuple[float, float, float, int], ...]:
    """Kinds of rows: (blocks, share of the stem, of the head, how many such rows)."""
    layers = rows_of(bench.model, schedule, mesh.pp, bench.stack.balanced)
    stems, heads = ends(schedule, mesh.pp)
    kinds: dict[tuple[float, float, float], int] = {}
    for row, count in enumerate(layers):
        kind = (count, (row in stems) / len(stems), (row in heads) / len(heads))
        kinds[kind] = kinds.get(kind, 0) + 1
    return tuple((*kind, many) for kind, many in kinds.items())


def _blocks(bench: Bench, mesh: Plan, axes: Axes, ways: Sequence[Plan]) -> Blocks:
    """Blocks of all ways: arrays (way, mode, size, kind)."""
    made, kept = _totals(bench, mesh, axes), array(_kept(bench, mesh, axes).block)[None]
    sizes = array([b for b, _ in axes.sizes], -1, 1)
    found: dict[Any, Blocks] = {}
    for plan in ways:
        key = (plan.zero == 3, plan.offload)
        if key not in found:
            found[key] = blocks(bench.model, plan, bench.cluster, bench.stack, sizes, made, kept)
    each = [found[plan.zero == 3, plan.offload] for plan in ways]
    shape = (1, len(axes.modes), len(axes.sizes), len(axes.kinds))

    def stacked(name: str) -> Array:
        return np.concatenate([np.broadcast_to(getattr(one, name), shape) for one in each])

    return Blocks(
        stacked("forward"), stacked("backward"), stacked("again"), made.stem, made.head, stacked("send")
    )


def _meeting(bench: Bench, axes: Axes, ways: Sequence[Plan], first: Share) -> Array:
    """Seconds in which gradients meet: (way, schedule, collective)."""
    found: dict[int, Array] = {}
    count = len(axes.schedules)
    for plan in ways:
        if plan.zero in found:
            continue
        each: list[Array] = []
        for name in axes.collectives:
            parts = met(like(plan, collective=name), bench.cluster, bench.stack, first)
            each.append(np.broadcast_to(sum(seconds for _, seconds in parts.values()), (count,)))
        found[plan.zero] = np.stack(each, axis=-1)
    return np.stack([found[plan.zero] for plan in ways])
