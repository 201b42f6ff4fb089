"""A pipeline whose rows may lie on unlike devices: each row takes what it takes on its own, and the cut suits them.

A row's seconds, memory and network are those of the cluster that its devices see; how a step is composed of rows and
how its timetable is played is the same as for equal devices.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace

from unisono.plan import Plan
from unisono.planner.collectives import message
from unisono.planner.cuts import cut_of, is_cuttable, rows_of, with_cut
from unisono.planner.machines.chip import Traffic, joined
from unisono.planner.machines.order import stride
from unisono.planner.memory import (
    Memory,
    MemoryVerdict,
    kept_of,
    learned,
    of_share,
    share_in,
    share_of,
    squeezed,
)
from unisono.planner.model_kinds import attending
from unisono.planner.price import composed
from unisono.planner.price_parts import Passes, Price, Rows, owned
from unisono.planner.request import PlanRequest
from unisono.planner.timetables import ends, in_flight
from unisono.planner.transformers import detail, message_bytes, passes
from unisono.planner.work.transformer import Transformer
from unisono.programs.balance import balance
from unisono.spec.errors import UsageError


def closed(ask: PlanRequest) -> Price:
    """A step; gradients and the update go at the pace of the pool where they take longest."""
    plan, cluster, stack, model = ask.plan, ask.cluster, ask.stack, dealt(ask)
    each, prices = _passes(ask), list[Price]()
    for pool in sorted(set(cluster.rows)):
        share = learned(model, share_of(model, plan, cluster.rows.index(pool), stack.balanced))
        # Whether a tied weight is on two rows is a matter of the pipeline's first row.
        met = replace(share, stem=each.first.stem, head=each.first.head)
        parts = replace(each, first=met, every=met, owned=owned(plan, share))
        prices.append(composed(model, plan, cluster.pools[pool], stack, parts, ask.micros))
    return max(prices, key=lambda price: price.step)


def rows(ask: PlanRequest) -> Rows:
    """Seconds of one micro-batch on each row, on its own devices."""
    plan, cluster = ask.plan, ask.cluster
    each = {
        pool: detail(dealt(ask), plan, cluster.pools[pool], ask.stack, ask.micro_batch).rows
        for pool in set(cluster.rows)
    }
    sends = _messages(ask)
    stems, heads = ends(plan.schedule, plan.pp)
    return Rows(
        tuple(each[pool].forward[row] for row, pool in enumerate(cluster.rows)),
        tuple(each[pool].backward[row] for row, pool in enumerate(cluster.rows)),
        each[cluster.rows[stems[0]]].stem,
        each[cluster.rows[heads[0]]].head,
        min(sends),
        tuple(send - min(sends) for send in sends),
    )


def _passes(ask: PlanRequest) -> Passes:
    """Return the passes of a step. Seconds of rows are their own; all other fields are weighted means over pools, by
    each pool's share of the blocks."""
    plan, cluster, stack, model, seconds = ask.plan, ask.cluster, ask.stack, dealt(ask), rows(ask)
    counts = rows_of(model, plan.schedule, plan.pp, stack.balanced)
    share = {
        pool: sum(n for n, at in zip(counts, cluster.rows, strict=True) if at == pool) / model.n_layer
        for pool in set(cluster.rows)
    }
    each = {
        pool: passes(model, plan, cluster.pools[pool], stack, ask.micro_batch, ask.micros) for pool in share
    }
    mean = sum(
        part * (sum(each[pool].rows.forward) + sum(each[pool].rows.backward)) for pool, part in share.items()
    )
    # Ends lie on one pool, and not by its share of the blocks.
    more = (sum(seconds.forward) + sum(seconds.backward)) / mean
    inside: dict[str, Traffic] = {}
    for pool, part in share.items():
        for axis, t in each[pool].inside.items():
            inside = joined(
                inside, {axis: Traffic(part * t.bytes, part * more * t.seconds, part * more * t.exposed)}
            )

    def whole(key: str) -> float:
        return more * sum(part * getattr(each[pool], key) for pool, part in share.items())

    parts = {key: whole(key) for key in ("arithmetic", "device", "again", "attention")}
    return replace(each[cluster.rows[0]], rows=seconds, inside=inside, **parts)


def _messages(ask: PlanRequest) -> tuple[float, ...]:
    """Seconds of one message of each row: of the dearer of the two boundaries that it has."""
    plan, cluster, stack = ask.plan, ask.cluster, ask.stack
    if plan.pp == 1:
        return (0.0,)
    moved = message_bytes(dealt(ask), plan, stack, ask.micro_batch)
    apart = stride(plan, "pp", cluster.order)
    if not cluster.rows:
        return (message(cluster, apart, moved, stack.p2p, plan.pp),) * plan.pp
    at = cluster.rows
    over = message(cluster, 1, moved, stack.p2p)

    def between(a: int, b: int) -> float:
        if at[a] != at[b]:
            return over
        return message(cluster.pools[at[a]], apart, moved, stack.p2p, at.count(at[a]))

    bounds = [between(row, row + 1) for row in range(plan.pp - 1)]
    return tuple(max(pair) for pair in zip([0.0, *bounds], [*bounds, 0.0], strict=True))


def cut(ask: PlanRequest) -> Plan:
    """The plan with the cut whose dearest row is cheapest, of those whose rows fit where any do; as it is where it says
    one, or where rows have several stages, which have equally many blocks."""
    plan, cluster, model = ask.plan, ask.cluster, dealt(ask)
    if plan.pp == 1 or cut_of(plan.schedule) or not is_cuttable(plan.schedule):
        return plan
    each = [
        detail(model, plan, cluster.of_row(row), ask.stack, ask.micro_batch).blocks for row in range(plan.pp)
    ]
    block = [blocks.forward + blocks.backward for blocks in each]
    beside = [2 * send for send in _messages(ask)]
    beside[0] += sum(each[0].stem)
    beside[-1] += sum(each[-1].head)
    costs = {
        "speeds": [1.0 / blocks for blocks in block],
        "beside": [b / o for b, o in zip(beside, block, strict=True)],
    }

    def fits(row: int, count: int) -> bool:
        even = [model.n_layer / plan.pp] * plan.pp
        even[row] = count
        return memory_of_row(ask, even, row).allocated <= cluster.of_row(row).device.room

    counts = range(1, model.n_layer + 1)
    room = [bisect(counts, False, key=lambda n, row=row: not fits(row, n)) for row in range(plan.pp)]
    try:
        stages = balance([1.0] * model.n_layer, 0.0, 0.0, plan.pp, rooms=room, **costs)
    except ValueError:  # nothing fits: what is fastest says by how much
        stages = balance([1.0] * model.n_layer, 0.0, 0.0, plan.pp, **costs)
    return replace(plan, schedule=with_cut(plan.schedule, [len(part) for part in stages]))


def dealt(ask: PlanRequest) -> Transformer:
    """The model. Raises UsageError for a network of parts, which nobody deals to unlike devices."""
    model = attending(ask.model)
    if model is None:
        raise UsageError("on devices of several kinds, transformers can be priced", where="model.kind",
                         fix="a cluster of one kind", code="C22")  # fmt: skip
    return model


def verdict(ask: PlanRequest) -> MemoryVerdict:
    """The row that lacks most, or has least left for its size."""
    plan = ask.plan
    counts, each = rows_of(dealt(ask), plan.schedule, plan.pp, ask.stack.balanced), list[MemoryVerdict]()
    for row in range(plan.pp):
        room = ask.cluster.of_row(row).device.room
        each.append(MemoryVerdict(row, squeezed(memory_of_row(ask, counts, row), room), room))
    return tightest(each)


def tightest(verdicts: Sequence[MemoryVerdict]) -> MemoryVerdict:
    """The one that lacks most memory, or has least left for its size."""
    return max(verdicts, key=lambda fit: (fit.short, fit.memory.total / fit.capacity))


def memory_of_row(ask: PlanRequest, counts: Sequence[float], row: int) -> Memory:
    """Of a rank of a row, where rows have so many blocks."""
    plan, stack, model = ask.plan, ask.stack, dealt(ask)
    share = share_in(model, plan, row, counts)
    held = in_flight(plan.schedule, row, plan.pp, ask.micros)
    return of_share(model, plan, stack, share, kept_of(model, plan, stack, ask.micro_batch), held)
