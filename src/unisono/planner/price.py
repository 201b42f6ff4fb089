"""Seconds of one step of a plan: blocks, timetable, data ranks, optimiser. Closed forms; `simulate` plays the order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner import replicas
from unisono.planner.collectives import all_reduce, bus, message
from unisono.planner.gathering import price_groups
from unisono.planner.machines.chip import Traffic, joined
from unisono.planner.machines.cluster import Cluster, Device
from unisono.planner.machines.order import owners, stride, virtual_of
from unisono.planner.memory import RowShare, by_zero, groups_of
from unisono.planner.model_kinds import Model, attending, kind
from unisono.planner.price_parts import (
    Passes,
    PipelineSeconds,
    Price,
    RowSeconds,
)
from unisono.planner.source import Source
from unisono.planner.stack import Stack
from unisono.planner.states import item_of, moments_of
from unisono.planner.timetables import chunks, handovers, idle, of
from unisono.planner.work import wire_formats
from unisono.planner.work.replica_traffic import leafwise
from unisono.spec.numbers import either, larger, smaller

_READ = "mixed precision reads gradient and master and writes master and weight: 4+4+4+2; Adam: 30 in all"
UPDATE_BYTES: Annotated[float, Source("specification", _READ)] = 14.0
MOMENT_BYTES: Annotated[float, Source("specification", "each moment is read and written, in fp32")] = 8.0
_LOOP = "benchmarks/measured.py: a step of ours on a model of next to no arithmetic, less its kernels; plain-cpu's too"
# Seconds of a step of our own loop beside its kernels.
LOOP: Annotated[float, Source("measured here", _LOOP)] = 640e-6
AXES = ("tp", "cp", "ep", "pp", "shard", "dp", "owners")  # in the order in which traffic is told


def work(pairs: Sequence[tuple[float, float]], many: Sequence[int]) -> RowSeconds:
    """Sum up rows. pairs: (forward, backward) seconds of each kind of row. many: rows of each kind."""
    f, b = pairs[0]
    slowest, ahead, cover, sum_f, sum_b = f + b, f, b, many[0] * f, many[0] * b
    for (f, b), count in zip(pairs[1:], many[1:], strict=True):
        slowest, ahead, cover = larger(slowest, f + b), smaller(ahead, f), smaller(cover, b)
        sum_f, sum_b = sum_f + count * f, sum_b + count * b
    return RowSeconds(slowest, ahead, cover, sum_f, sum_b)


def line(schedule: str, ranks: int, micros: float, rows: RowSeconds, send: float) -> PipelineSeconds:
    """Return the seconds of a pipeline of these rows."""
    # The dearest row waits while the others fill and drain the pipeline: for their mean.
    others = (
        (rows.forward + rows.backward - rows.slowest) / (rows.forward + rows.backward) / max(1, ranks - 1)
    )
    other_f, other_b = rows.forward * others, rows.backward * others
    # Towards the weights a backward pass has the forward pass's products.
    waits = idle(schedule, ranks, micros, other_f, other_b, smaller(other_f, other_b / 2))
    v = chunks(schedule)
    messages = 2 * send * (micros * v + ranks - 1) if ranks > 1 else 0.0 * micros
    mean = (rows.forward + rows.backward) / ranks
    return PipelineSeconds(rows.slowest, mean, rows.ahead, rows.cover, waits, messages)


def price(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """A step of `micros` micro-batches on every data rank, on devices of their own."""
    each = kind(model).passes(model, plan, cluster, stack, micro_batch, micros)
    return composed(model, plan, cluster, stack, each, micros)


def composed(model: Model, plan: Plan, cluster: Cluster, stack: Stack, each: Passes, micros: int) -> Price:
    """Compose a step of its passes, its timetable's bubble, gradients and the update."""
    pairs = list(zip(each.rows.forward, each.rows.backward, strict=True))
    whole = line(plan.schedule, plan.pp, micros, work(pairs, [1] * plan.pp), each.rows.send)
    messages = whole.messages + tied(model, plan, cluster, stack, each.first)
    over = covered(plan.schedule, plan.pp, micros, whole, stack.dp_hidden)
    data = replicated(model, plan, cluster, stack, each.first, each.every, over, micros)
    moments = moments_of(model, plan, each.first.elements, each.first.layers)
    optimizer = update(moments, cluster.device, stack, each.owned)
    if model.steps is not None:
        data["owners"], computing = model.steps.price(
            plan, cluster, stack, kind(model).layers(model, plan, stack.balanced)
        )
        optimizer += computing
    fixed = fixed_of(model, stack) + stack.micro * micros
    exposed = messages + sum(t.exposed for t in data.values())
    comm = each.inside
    if plan.pp > 1:
        # Of the mean row: what it hands on and back, and gradients of what two rows have.
        handed = each.handed * 2 * micros * handovers(plan.schedule, plan.pp)
        twice, rows = twins(model, plan, stack, each.first)
        comm = comm | {"pp": Traffic((handed + rows * twice) / plan.pp, messages, messages)}
    comm = joined(comm, data)
    return Price(
        step=micros * whole.slowest + whole.idle + exposed + optimizer + fixed,
        arithmetic=each.arithmetic,
        kernels=each.device - each.again - each.arithmetic,
        host=micros * whole.mean - each.device - sum(traffic.exposed for traffic in each.inside.values()),
        idle=whole.idle,
        uneven=micros * (whole.slowest - whole.mean),
        busiest=micros * whole.slowest,
        optimizer=optimizer,
        fixed=fixed,
        comm={axis: comm[axis] for axis in AXES if axis in comm},
        recompute=each.again,
        attention=each.attention,
    )


def fixed_of(model: Model, stack: Stack) -> float:
    """Return the fixed seconds of a step: fitted to published runs of transformers, of other models our own loop's."""
    return stack.step if attending(model) is not None or not stack.autograd else min(stack.step, LOOP)


def update(moments: float, device: Device, stack: Stack, elements: float) -> float:
    """Return seconds of the optimiser's update of so many elements. moments: numbers that it keeps of each."""
    return elements * (UPDATE_BYTES + MOMENT_BYTES * moments) / (device.bandwidth * stack.elementwise)


def tied(model: Model, plan: Plan, cluster: Cluster, stack: Stack, share: RowShare) -> float:
    """Seconds in which two rows sum the gradients of what both have: the first and the last of a tied weight, those
    that mirror each other of all that DualPipe has twice. share: the first row's; of the plan only mesh and zero are
    read."""
    if plan.pp == 1:
        return 0.0
    far, (moved, _) = stride(plan, "pp", cluster.order) * (plan.pp - 1), twins(model, plan, stack, share)
    return either(moved > 0, message(cluster, far, moved, stack.dp_bus), 0.0)


def twins(model: Model, plan: Plan, stack: Stack, share: RowShare) -> tuple[float, float]:
    """(bytes of the gradients that two rows sum, how many rows do)."""
    owning = owners(plan)[0]
    every = (share.blocks + share.ends + share.routed) / (owning if plan.zero > 1 or stack.autograd else 1)
    apart = 1.0 - share.stem * share.head  # both ends on one row need no message
    once = apart * model.tied_elements / plan.tp / (owning if stack.autograd else 1)
    return either(share.copies > 1, every, once) * stack.reduce_bytes, either(share.copies > 1, plan.pp, 2.0)


def scattered(plan: Plan, cluster: Cluster, stack: Stack, share: RowShare) -> tuple[float, float]:
    """Return (bytes a rank sends, seconds) of one pass's gradients on their way to their owners, where each pass
    hands them over."""
    item = wire_formats.scattered(plan, stack.reduce_bytes)
    return _added(
        price_groups(groups_of(plan, part), plan, cluster, stack, item)
        for way, part in by_zero(plan, share)
        if scatters(way)
    )


def gathered(plan: Plan, cluster: Cluster, stack: Stack, share: RowShare) -> tuple[float, float]:
    """Return (bytes a rank sends, seconds) of weights that are gathered after the update, below zero=3."""
    item = wire_formats.gathered(plan, item_of(plan, stack))
    return _added(
        price_groups(groups_of(plan, part), plan, cluster, stack, item)
        for way, part in by_zero(plan, share)
        if _late(way)
    )


def _late(plan: Plan) -> bool:
    """Whether weights and gradients meet on shard once a step."""
    return plan.shard > 1 and plan.zero < 3


def _added(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    sent = seconds = 0.0
    for pair in pairs:
        sent, seconds = sent + pair[0], seconds + pair[1]
    return sent, seconds


def crossing(plan: Plan, share: RowShare) -> float:
    """Elements of one rank's gradient that meet on dp."""
    return sum(elements / size for elements, size in groups_of(plan, share))


def met(plan: Plan, cluster: Cluster, stack: Stack, share: RowShare) -> dict[str, tuple[float, float]]:
    """(bytes that a rank sends, seconds) of gradients that meet once a step, by axis: on shard below zero=3; on cp
    alone, whose ranks see other tokens with the same weights; and on dp. share: the first row's; of the plan mesh,
    zero, and precision are read."""
    parts: dict[str, tuple[float, float]] = {}
    late = [part for way, part in by_zero(plan, share) if _late(way)]
    if late:
        item = wire_formats.scattered(plan, stack.reduce_bytes)
        parts["shard"] = _added(
            price_groups(groups_of(plan, part), plan, cluster, stack, item) for part in late
        )
    # By virtual shards each pass has added up its own.
    if plan.cp > 1 and plan.shard == 1 and virtual_of(plan) == 1:
        net = bus(cluster, stride(plan, "cp", cluster.order), plan.cp, stack.dp_bus)
        # Experts that ep has dealt to all of cp's ranks are each on one of them.
        whole = share.blocks + share.ends + (share.routed if plan.ep < plan.cp * plan.tp else 0.0)
        whole = whole - share.alone  # which meets over cp and tp at once
        parts["cp"] = (net.sent(whole * stack.reduce_bytes), net.all_reduce(whole * stack.reduce_bytes))
    if isinstance(share.alone, float) and share.alone:
        ranks, near = plan.tp, stride(plan, "tp", cluster.order)
        if plan.cp > 1 and plan.shard == 1:
            ranks, near = ranks * plan.cp, min(near, stride(plan, "cp", cluster.order))
        net = bus(cluster, near, ranks, stack.dp_bus)
        part = share.alone / owners(plan)[0] * stack.reduce_bytes
        parts["tp"] = (net.sent(part), net.all_reduce(part))
    if plan.dp > 1:
        apart = stride(plan, "dp", cluster.order)
        net = bus(cluster, apart, plan.dp, stack.dp_bus)
        owned = crossing(plan, share) * stack.reduce_bytes
        way = getattr(member("collective", plan.collective), "program", None)
        seconds = all_reduce(cluster, apart, plan.dp, owned, stack.dp_bus, way)
        parts["dp"] = (net.sent(owned), seconds)
    return parts


def scatters(plan: Plan) -> bool:
    """Whether every backward pass hands over its gradients: who keeps a part of them alone cannot add up the rest, nor
    can a policy that wants each by itself. (Under zero=3 this is part of a block's passes.)"""
    return plan.shard > 1 and (plan.zero == 2 or (plan.zero == 1 and leafwise(plan)))


def replicated(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    stack: Stack,
    first: RowShare,
    every: RowShare,
    over: replicas.Cover,
    micros: int,
) -> dict[str, Traffic]:
    """What data ranks tell each other in a step, under the plan's policy and codec."""
    coded = plan.dp > 1 and not replicas.plain(plan)
    handed = scattered(plan, cluster, stack, every)
    once = met(plan, cluster, stack, first)
    if coded:
        del once["dp"]
    data = meeting(once, handed, gathered(plan, cluster, stack, first), over, micros)
    if coded:
        sent, seconds, shows = replicas.traffic(model, plan, cluster, stack, crossing(plan, first), over)
        data["dp"] = Traffic(sent, seconds, shows, shows)
    return data


def meeting(
    once: Mapping[str, tuple[float, float]], every: tuple[float, float], back: tuple[float, float],
    over: replicas.Cover, micros: int,
) -> dict[str, Traffic]:  # fmt: skip
    """(bytes, seconds) of gradients as traffic; what shows is shared out by seconds. once: a step, by axis. every: what
    each backward pass but the last hands over on shard besides. back: weights that are gathered there for the next
    forward pass."""
    seconds = sum(part[1] for part in once.values())
    share = over.beside_backward(seconds) / seconds if seconds else 0.0
    traffic = {axis: Traffic(sent, took, took * share, took * share) for axis, (sent, took) in once.items()}
    rest = micros - 1
    for (sent, took), shows in (
        ((rest * every[0], rest * every[1]), rest * over.beside_each(every[1])),
        (back, over.beside_forward(back[1])),
    ):
        if took:
            traffic["shard"] += Traffic(sent, took, shows, shows)
    return traffic


def covered(
    schedule: str, ranks: int, micros: float, whole: PipelineSeconds, hidden: float
) -> replicas.Cover:
    """What gradients, and weights on their way back, may hide behind. Of several stages on a rank, `ranks`
    micro-batches go through each before they go through the next; where weight gradients come apart, all are late."""
    stages = chunks(schedule)
    ahead = (
        (stages - 1) * smaller(micros, ranks * 1.0)
        if stages > 1 and not of(schedule).halves
        else 0.0 * micros
    )
    return replicas.Cover(whole.ahead, whole.cover, hidden, stages, ahead)
