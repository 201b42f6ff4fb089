"""One pipeline over a mixture: its cut by the speed and memory of each row's device, its seconds, its bytes.

A row is priced as `price` prices rows of equal devices, with its own pool's device and links; the timetable is played
with what each row takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.plan import Plan
from unisono.planner.collectives import message
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.mixture import Mixture
from unisono.planner.machines.order import stride
from unisono.planner.memory import Memory, kept_of, of_share, share_in
from unisono.planner.parts import Detail, Kernels, Price, Rows, Traffic
from unisono.planner.played import span
from unisono.planner.price import (
    AXES,
    blocks,
    gradients,
    inside_blocks,
    joined,
    kernels,
    message_bytes,
    owned,
    row_seconds,
    tied,
    update,
)
from unisono.planner.screen import like
from unisono.planner.stack import Stack
from unisono.planner.timetables import chunks, ends, in_flight, name_of
from unisono.planner.work.transformer import Transformer
from unisono.programs.balance import balance


@dataclass(frozen=True, slots=True)
class MixedShared:
    """What all plans of a question share, and what of them was computed already."""

    model: Transformer
    mixture: Mixture
    stack: Stack
    memo: dict[Any, Kernels] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class MixedRow:
    """One row of the pipeline: its pool, blocks, seconds of one micro-batch forward and backward, of one message, and
    memory of one of its ranks beside what the device and its host have, in bytes."""

    pool: int
    layers: float
    forward: float
    backward: float
    message: float
    memory: Memory
    capacity: float

    @property
    def short(self) -> float:
        """Bytes that are missing, 0 where it fits."""
        return max(0.0, self.memory.total - self.capacity)


@dataclass(frozen=True, slots=True)
class MixedPipeline:
    """A pipeline from its first row to its last, and the seconds of a step of it."""

    rows: tuple[MixedRow, ...]
    price: Price

    @property
    def short(self) -> float:
        return max(row.short for row in self.rows)


@dataclass(frozen=True, slots=True)
class Way:
    """Where a pipeline lies. where: pool of each row. beside: its replicas in one pool. net: over which gradients meet
    on dp and shard, by pool; cut: blocks of each row, None for the best."""

    where: tuple[int, ...]
    beside: int
    nets: Mapping[int, Cluster]
    cut: tuple[float, ...] | None = None


def lane(bench: MixedShared, plan: Plan, way: Way, micro_batch: int, micros: int) -> MixedPipeline:
    """A step of `micros` micro-batches of every replica of this pipeline, played."""
    model, stack = bench.model, bench.stack
    each = {pool: detail(bench, plan, pool, micro_batch) for pool in sorted(set(way.where))}
    sends = messages(bench, plan, way, micro_batch)
    cut = way.cut or best_cut(bench, plan, way, each, sends, micro_batch, micros)
    rows, shares = [], [share_in(model, plan, row, cut) for row in range(plan.pp)]
    for row, pool in enumerate(way.where):
        ahead, back = _seconds(plan, each[pool], row, cut[row])
        held = _memory(bench, plan, row, cut, micro_batch, micros)
        device = bench.mixture.pools[pool].device
        rows.append(MixedRow(pool, cut[row], ahead, back, sends[row], held, device.room))
    cover = min(row.backward for row in rows) / chunks(plan.schedule)
    shown = [
        gradients(plan, way.nets[pool], stack, share, cover, micros)
        for pool, share in dict.fromkeys(zip(way.where, shares, strict=True))
    ]
    data = max(shown, key=lambda traffic: sum(t.exposed for t in traffic.values()))
    updated = max(
        update(model, bench.mixture.pools[pool].device, stack, owned(plan, share))
        for pool, share in zip(way.where, shares, strict=True)
    )
    ends_seconds = _tied(bench, plan, way, shares[0])
    moved = message_bytes(model, plan, stack, micro_batch) * 2 * chunks(plan.schedule) * micros
    return MixedPipeline(
        tuple(rows),
        _price(bench, plan, each, rows, data, updated, (moved, ends_seconds), micro_batch, micros),
    )


def detail(bench: MixedShared, plan: Plan, pool: int, micro_batch: int) -> Detail:
    """A block, stem and head on a pool's devices, dealt as the plan says."""
    where = bench.mixture.pools[pool]
    key = (
        pool,
        plan.tp,
        plan.cp,
        plan.ep,
        plan.cp_kind,
        plan.schedule,
        plan.recompute,
        plan.precision,
        micro_batch,
    )
    if key not in bench.memo:
        bench.memo[key] = kernels(bench.model, plan, where, bench.stack, micro_batch)
    made = bench.memo[key]
    each = blocks(bench.model, plan, where, bench.stack, micro_batch, made.totals)
    return Detail(Rows((), ()), made, each)


def messages(bench: MixedShared, plan: Plan, way: Way, micro_batch: int) -> tuple[float, ...]:
    """Seconds of one message of each row: of the dearer of the two boundaries that it has."""
    if plan.pp == 1:
        return (0.0,)
    moved, share = message_bytes(bench.model, plan, bench.stack, micro_batch), bench.stack.p2p
    apart = way.beside * stride(plan, "dp")
    inside = {
        pool: message(bench.mixture.pools[pool], apart, moved, share, way.where.count(pool))
        for pool in set(way.where)
    }
    over = message(bench.mixture.across, 1, moved, share)

    def between(a: int, b: int) -> float:
        return inside[way.where[a]] if way.where[a] == way.where[b] else over

    last = plan.pp - 1
    at = [between(row, row + 1) for row in range(last)]
    # Of several stages a row, one after the other, the way goes round.
    round_trip = between(last, 0) if _row_of(plan, plan.pp) == 0 and chunks(plan.schedule) > 1 else 0.0
    before, after = [round_trip, *at], [*at, round_trip]
    return tuple(max(pair) for pair in zip(before, after, strict=True))


def best_cut(
    bench: MixedShared,
    plan: Plan,
    way: Way,
    each: Mapping[int, Detail],
    sends: Sequence[float],
    micro_batch: int,
    micros: int,
) -> tuple[float, ...]:
    """Blocks of each row, so that the dearest one is as cheap as can be and, where that can be, all fit."""
    n, stages = bench.model.n_layer, plan.pp * chunks(plan.schedule)
    if plan.pp == 1 or stages > n:
        return (n / plan.pp,) * plan.pp
    rows = [_row_of(plan, stage) for stage in range(stages)]
    block = [sum(_one(each[way.where[row]])) for row in rows]
    beside = [
        (sum(_seconds(plan, each[way.where[row]], row, 0.0)) / chunks(plan.schedule) + 2 * sends[row]) / one
        for row, one in zip(rows, block, strict=True)
    ]
    speeds = [1.0 / one for one in block]

    def cut(rooms: Sequence[float]) -> tuple[float, ...]:
        ranges = balance([1.0] * n, 0.0, 0.0, stages, speeds=speeds, beside=beside, rooms=rooms)
        counts = [0.0] * plan.pp
        for row, part in zip(rows, ranges, strict=True):
            counts[row] += len(part)
        return tuple(counts)

    def fits(row: int, layers: int) -> bool:
        even = [n / plan.pp] * plan.pp
        even[row] = layers
        held = _memory(bench, plan, row, even, micro_batch, micros)
        return held.total <= bench.mixture.pools[way.where[row]].device.room

    free = cut(())
    if all(fits(row, int(count)) for row, count in enumerate(free)):
        return free
    room = [_most(n, lambda layers, row=row: fits(row, layers)) for row in range(plan.pp)]
    try:
        return cut([room[row] / chunks(plan.schedule) for row in rows])
    except ValueError:  # nothing fits: what is fastest says by how much
        return free


def _most(limit: int, holds: Any) -> int:
    """The greatest number up to `limit` for which something holds that holds for all smaller ones; 0 if for none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _row_of(plan: Plan, stage: int) -> int:
    """The row that a stage lies on."""
    if name_of(plan.schedule) in ("zbv", "dualpipev") and stage >= plan.pp:
        return 2 * plan.pp - 1 - stage
    return stage % plan.pp


def _one(each: Detail) -> tuple[float, float]:
    return each.blocks.forward, each.blocks.backward


def _seconds(plan: Plan, each: Detail, row: int, layers: float) -> tuple[float, float]:
    stems, heads = ends(plan.schedule, plan.pp)
    return row_seconds(each.blocks, layers, (row in stems) / len(stems), (row in heads) / len(heads))


def _memory(
    bench: MixedShared, plan: Plan, row: int, cut: Sequence[float], micro_batch: int, micros: int
) -> Memory:
    share = share_in(bench.model, plan, row, cut)
    kept = kept_of(bench.model, plan, bench.stack, micro_batch)
    return of_share(
        bench.model, plan, bench.stack, share, kept, in_flight(plan.schedule, row, plan.pp, micros)
    )


def _tied(bench: MixedShared, plan: Plan, way: Way, first: Any) -> float:
    """Seconds in which the ends of the pipeline sum the gradients of a tied weight."""
    if way.where[0] != way.where[-1]:
        return tied(bench.model, plan, bench.mixture.across, bench.stack, first)
    here = like(plan, dp=way.beside)
    return tied(bench.model, here, bench.mixture.pools[way.where[0]], bench.stack, first)


def _price(
    bench: MixedShared,
    plan: Plan,
    each: Mapping[int, Detail],
    rows: Sequence[MixedRow],
    data: Mapping[str, Traffic],
    update: float,
    messages: tuple[float, float],
    micro_batch: int,
    micros: int,
) -> Price:
    """The step in parts: of the busiest row, and of the mean one what is inside of it."""
    model, stack, v = bench.model, bench.stack, chunks(plan.schedule)
    busy = max(rows, key=lambda row: row.forward + row.backward + 2 * row.message * v)
    busiest, mean = (
        micros * (busy.forward + busy.backward),
        sum(r.forward + r.backward for r in rows) * micros / plan.pp,
    )
    sent = 2 * busy.message * micros * v
    idle = max(0.0, _played(bench, plan, each, rows, micros) - busiest - sent)
    comm: dict[str, Traffic] = {}
    arithmetic = attention = device = second = over = 0.0
    for pool, own in each.items():
        layers = sum(row.layers for row in rows if row.pool == pool)
        part, times = layers / model.n_layer, layers * micros / plan.pp
        for axis, t in inside_blocks(
            model, plan, bench.mixture.pools[pool], stack, own, micro_batch, micros
        ).items():
            comm = joined(comm, {axis: Traffic(part * t.bytes, part * t.seconds, part * t.exposed)})
        arithmetic += own.once("arithmetic") * times
        attention += own.once("attention") * times
        device += own.both("device") * times
        second += own.kernels.more.device * times
        over -= part * own.blocks.rims * micros / plan.pp  # which shows on shard
    _, heads = ends(plan.schedule, plan.pp)
    arithmetic += sum(each[rows[row].pool].kernels.products for row in heads) / len(heads) * micros / plan.pp
    for row, own in enumerate(rows):
        over += sum(_seconds(plan, each[own.pool], row, 0.0)) * micros / plan.pp
    shown = sum(traffic.exposed for traffic in comm.values())
    if plan.pp > 1:
        comm["pp"] = Traffic(messages[0], sent + messages[1], sent + messages[1])
    comm = joined(comm, data)
    fixed = stack.step + stack.micro * micros
    exposed = sum(t.exposed for t in data.values()) + (sent + messages[1] if plan.pp > 1 else 0.0)
    return Price(
        step=busiest + idle + exposed + update + fixed,
        arithmetic=arithmetic,
        kernels=device - second - arithmetic + over,
        recompute=second,
        host=mean - device - over - shown,
        idle=idle,
        uneven=busiest - mean,
        busiest=busiest,
        optimizer=update,
        fixed=fixed,
        comm={axis: comm[axis] for axis in AXES if axis in comm},
        attention=attention,
    )


def _played(
    bench: MixedShared, plan: Plan, each: Mapping[int, Detail], rows: Sequence[MixedRow], micros: int
) -> float:
    """Seconds from the first start to the last stop."""
    if plan.pp == 1:
        return micros * (rows[0].forward + rows[0].backward)
    stems, heads = ends(plan.schedule, plan.pp)
    least = min(row.message for row in rows)
    found = span(
        plan.schedule,
        bench.model.n_layer,
        micros,
        Rows(
            tuple(row.forward for row in rows),
            tuple(row.backward for row in rows),
            each[rows[stems[0]].pool].blocks.stem,
            each[rows[heads[0]].pool].blocks.head,
            least,
            tuple(row.message - least for row in rows),
        ),
    )
    return float("inf") if found is None else found
