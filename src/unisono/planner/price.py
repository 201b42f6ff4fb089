"""Seconds of one step of a plan: blocks, timetable, data ranks, optimiser. Closed forms; `simulate` plays the order."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from unisono.plan import Plan
from unisono.planner import block, experts, gathering, general, replicas
from unisono.planner.block import dealt
from unisono.planner.collectives import all_reduce, bus, message
from unisono.planner.cuts import rows_of
from unisono.planner.kernels import chip
from unisono.planner.machines.cluster import Cluster, Device, Source
from unisono.planner.machines.order import owners, stride
from unisono.planner.memory import ITEM, RowShare, item_of, own_list, share_of
from unisono.planner.parts import (
    Blocks,
    Detail,
    Kernels,
    Passes,
    PipelineSeconds,
    Price,
    Rows,
    RowSeconds,
    Totals,
    Traffic,
)
from unisono.planner.stack import Stack
from unisono.planner.timetables import chunks, ends, handovers, idle, of
from unisono.planner.work.calls import leafwise
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer, crossings
from unisono.spec.numbers import either, larger, smaller

Model = Transformer | Network

_READ = "mixed precision reads gradient and master and writes master and weight: 4+4+4+2; Adam: 30 in all"
UPDATE_BYTES: Annotated[float, Source("specification", _READ)] = 14.0
MOMENT_BYTES: Annotated[float, Source("specification", "each moment is read and written, in fp32")] = 8.0
AXES = ("tp", "cp", "ep", "pp", "shard", "dp")  # in the order in which traffic is told


def kernels(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> Kernels:
    """What depends on tp, cp, ep, the micro-batch, recompute and precision alone."""
    on = chip(cluster.device, stack, plan.precision, ITEM[plan.precision])
    how = dealt(model, plan, cluster, stack, micro_batch)
    back, more = block.backward(model, stack, on, how), block.again(model, stack, on, how, plan.recompute)
    stem = [block.stem(model, on, how, backward=way) for way in (False, True)]
    head = [block.head(model, stack, on, how, backward=way) for way in (False, True)]
    ahead = block.forward(model, stack, on, how)
    products = sum(block.classifier(model, on, how, backward=way) for way in (False, True))
    return Kernels(ahead, back + more, more, (stem[0], stem[1]), (head[0], head[1]), products)


def blocks(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: float, made: Totals
) -> Blocks:
    """A block with its weights on their way to and from shard. Of the plan only mesh, zero and precision are read: the
    rest may be arrays."""
    gathered = gathering.shown(model, plan, cluster, stack, made.ahead, made.back)
    stem, head = gathering.rims(model, plan, cluster, stack)
    return Blocks(
        forward=made.ahead + gathered[0],
        backward=made.back + gathered[1],
        stem=(made.stem[0] + stem[0], made.stem[1] + stem[1]),
        head=(made.head[0] + head[0], made.head[1] + head[1]),
        send=_send(model, plan, cluster, stack, micro_batch),
        shard=sum(gathered),
        rims=sum(stem) + sum(head),
    )


def row_seconds(each: Blocks, layers: float, stem: float, head: float) -> tuple[float, float]:
    """Seconds, forward and backward, of a row with so many blocks and such a share of stem and head."""
    return (
        layers * each.forward + stem * each.stem[0] + head * each.head[0],
        layers * each.backward + stem * each.stem[1] + head * each.head[1],
    )


def detail(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> Detail:
    """What each row of the pipeline takes for one micro-batch, and what that comes from."""
    made = kernels(model, plan, cluster, stack, micro_batch)
    each = blocks(model, plan, cluster, stack, micro_batch, made.totals)
    stems, heads = ends(plan.schedule, plan.pp)
    pairs = [
        row_seconds(each, count, (row in stems) / len(stems), (row in heads) / len(heads))
        for row, count in enumerate(rows_of(model, plan.schedule, plan.pp, stack.balanced))
    ]
    found = Rows(tuple(f for f, _ in pairs), tuple(b for _, b in pairs), each.stem, each.head, each.send)
    return Detail(found, made, each)


def work(pairs: Sequence[tuple[float, float]], many: Sequence[int]) -> RowSeconds:
    """Of rows that take `pairs` seconds, forward and backward, each kind of them `many` times."""
    f, b = pairs[0]
    slowest, ahead, cover, sum_f, sum_b = f + b, f, b, many[0] * f, many[0] * b
    for (f, b), count in zip(pairs[1:], many[1:], strict=True):
        slowest, ahead, cover = larger(slowest, f + b), smaller(ahead, f), smaller(cover, b)
        sum_f, sum_b = sum_f + count * f, sum_b + count * b
    return RowSeconds(slowest, ahead, cover, sum_f, sum_b)


def line(schedule: str, ranks: int, micros: float, made: RowSeconds, send: float) -> PipelineSeconds:
    """The pipeline of rows with so much work."""
    # The dearest row waits while the others fill and drain the pipeline: for their mean.
    others = (
        (made.forward + made.backward - made.slowest) / (made.forward + made.backward) / max(1, ranks - 1)
    )
    other_f, other_b = made.forward * others, made.backward * others
    # Towards the weights a backward pass has the forward pass's products.
    waits = idle(schedule, ranks, micros, other_f, other_b, smaller(other_f, other_b / 2))
    v = chunks(schedule)
    messages = 2 * send * (micros * v + ranks - 1) if ranks > 1 else 0.0 * micros
    mean = (made.forward + made.backward) / ranks
    return PipelineSeconds(made.slowest, mean, made.ahead, made.cover, waits, messages)


def passes(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, micros: int
) -> Passes:
    """What the passes of a step take."""
    each = detail(model, plan, cluster, stack, micro_batch)
    first, layers, share = (
        share_of(model, plan, 0, stack.balanced),
        model.n_layer / plan.pp * micros,
        micros / plan.pp,
    )
    ends_ = sum(each.rows.stem) + sum(each.rows.head) - each.blocks.rims
    return Passes(
        rows=each.rows,
        handed=message_bytes(model, plan, stack, micro_batch),
        first=first,
        every=first,
        owned=owned(plan, first),
        inside=inside_blocks(model, plan, cluster, stack, each, micro_batch, micros),
        arithmetic=each.once("arithmetic") * layers + share * each.kernels.products,
        device=each.both("device") * layers + share * ends_,
        again=each.kernels.more.device * layers,
        attention=each.once("attention") * layers,
    )


def price(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """A step of `micros` micro-batches on every data rank, on devices of their own."""
    of = passes if isinstance(model, Transformer) else general.passes
    each = of(model, plan, cluster, stack, micro_batch, micros)  # type: ignore[arg-type]
    return composed(model, plan, cluster, stack, each, micros)


def composed(model: Model, plan: Plan, cluster: Cluster, stack: Stack, each: Passes, micros: int) -> Price:
    """A step of passes that take so long."""
    pairs = list(zip(each.rows.forward, each.rows.backward, strict=True))
    whole = line(plan.schedule, plan.pp, micros, work(pairs, [1] * plan.pp), each.rows.send)
    messages = whole.messages + tied(model, plan, cluster, stack, each.first)
    over = covered(plan.schedule, plan.pp, micros, whole, stack.dp_hidden)
    data = replicated(model, plan, cluster, stack, each.first, each.every, over, micros)
    optimizer = update(model, cluster.device, stack, each.owned)
    fixed = stack.step + stack.micro * micros
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


def owned(plan: Plan, share: RowShare) -> float:
    """Elements that one rank updates."""
    return ((share.blocks + share.ends) / owners(plan)[0] + share.routed / max(1, share.ranks)) / share.copies


def update(model: Model, device: Device, stack: Stack, elements: float) -> float:
    """Seconds of the optimiser's update of so many elements."""
    return elements * (UPDATE_BYTES + MOMENT_BYTES * model.states) / (device.bandwidth * stack.elementwise)


def _send(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: float) -> float:
    """Seconds of one message between stages."""
    if plan.pp == 1:
        return 0.0
    moved = message_bytes(model, plan, stack, micro_batch)
    return message(cluster, stride(plan, "pp", cluster.order), moved, stack.p2p, plan.pp)


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


def message_bytes(model: Transformer, plan: Plan, stack: Stack, micro_batch: float) -> float:
    whole = micro_batch * model.context / plan.cp * model.d_model * item_of(plan, stack)
    return whole / plan.tp if stack.scatter_gather or stack.sequence_parallel else whole


def _tensor_bytes(model: Transformer, plan: Plan, stack: Stack, micro_batch: int, share: float) -> float:
    """Bytes that a rank sends on tp for one block, both ways. share: of blocks that are wholly computed again."""
    tokens, again = micro_batch * model.context / plan.cp, share > 0.0
    if own_list(model, stack):
        made = crossings(model, tokens, ITEM[plan.precision])
        once = (*made, *made, *(crossings(model, tokens, ITEM[plan.precision], again) if again else ()))
        return sum(nbytes * times for nbytes, times in once) * (plan.tp - 1) / plan.tp
    whole = tokens * model.d_model * ITEM[plan.precision]
    times = block.reduces(model, plan.ep) * (2 + (0.5 if stack.sequence_parallel else 0) + share)
    return times * 2.0 * (plan.tp - 1) / plan.tp * whole


def inside_blocks(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, each: Detail, micro_batch: int, micros: int
) -> dict[str, Traffic]:  # fmt: skip
    """What is sent, and what of it shows, inside the passes over blocks, by axis."""
    layers, again = model.n_layer / plan.pp * micros, float(plan.recompute == "full")
    found: dict[str, Traffic] = {}

    def add(axis: str, sent: float, shows: str, hides: str) -> None:
        exposed, hidden = each.both(shows), each.both(hides)
        found[axis] = Traffic(sent * layers, (exposed + hidden) * layers, exposed * layers)

    if plan.tp > 1:
        add("tp", _tensor_bytes(model, plan, stack, micro_batch, again), "exposed", "hidden")
    if plan.cp > 1:
        how, item = dealt(model, plan, cluster, stack, micro_batch), ITEM[plan.precision]
        once = block.context_bytes(model, how, item, 1)
        add("cp", once + block.context_bytes(model, how, item, 2) + once * again, "context", "ringed")
    if plan.ep > 1:
        add("ep", _routed_bytes(model, plan, micro_batch, again), "routing", "routed")
    if gathering.deals(plan):
        (sent, seconds), rims = gathering.total(model, plan, cluster, stack)
        found["shard"] = Traffic(sent * layers, seconds * layers, each.blocks.shard * layers)
        found["shard"] += Traffic(*(micros / plan.pp * part for part in (*rims, each.blocks.rims)))
    return found


def _routed_bytes(model: Transformer, plan: Plan, micro_batch: int, share: float) -> float:
    """Bytes that a rank sends on ep for one block, forward and backward: to the experts and back, twice.
    share: of blocks that are computed again as a whole."""
    if model.experts is None or plan.ep == 1:
        return 0.0
    tokens = micro_batch * model.context / plan.cp
    held = experts.exchanged(model, model.experts, tokens, plan.tp, ITEM[plan.precision])
    times = 4 + 2 * share
    return times * model.sparse_share * (plan.ep - 1) / plan.ep * held


def scattered(plan: Plan, cluster: Cluster, stack: Stack, share: RowShare) -> tuple[float, float]:
    """(bytes that a rank sends, seconds) of one pass's gradients on their way to who owns them."""
    return _dealt(plan, cluster, stack, share, stack.reduce_bytes)


def gathered(plan: Plan, cluster: Cluster, stack: Stack, share: RowShare) -> tuple[float, float]:
    """The same of weights on their way back after the update, below zero=3."""
    if plan.shard == 1 or plan.zero == 3:
        return 0.0, 0.0
    return _dealt(plan, cluster, stack, share, item_of(plan, stack))


def _dealt(plan: Plan, cluster: Cluster, stack: Stack, share: RowShare, item: float) -> tuple[float, float]:
    """Of all elements of `item` bytes, gathered or scattered once."""
    sent = seconds = 0.0
    every, near = owners(plan, cluster.order)
    for elements, size in _groups(plan, share):
        net, moved = bus(cluster, near * every // size, size, stack.dp_bus), elements * item
        sent, seconds = sent + net.sent(moved) / 2, seconds + net.gather(moved)
    return sent, seconds


def _groups(plan: Plan, share: RowShare) -> list[tuple[float, int]]:
    """(elements, ranks that they are dealt to): all of the model but its routed experts, and those."""
    return [
        (share.blocks + share.ends, owners(plan)[0]),
        *([(share.routed, share.ranks)] if share.ranks else []),
    ]


def crossing(plan: Plan, share: RowShare) -> float:
    """Elements of one rank's gradient that meet on dp."""
    return sum(elements / size for elements, size in _groups(plan, share))


def met(plan: Plan, cluster: Cluster, stack: Stack, share: RowShare) -> dict[str, tuple[float, float]]:
    """(bytes that a rank sends, seconds) of gradients that meet once a step, by axis: on shard below zero=3; on cp
    alone, whose ranks see other tokens with the same weights; and on dp. share: the first row's; of the plan mesh,
    zero, and precision are read."""
    parts: dict[str, tuple[float, float]] = {}
    if plan.shard > 1 and plan.zero < 3:
        parts["shard"] = scattered(plan, cluster, stack, share)
    if plan.cp > 1 and plan.shard == 1:
        net = bus(cluster, stride(plan, "cp", cluster.order), plan.cp, stack.dp_bus)
        # Experts that ep has dealt to all of cp's ranks are each on one of them.
        whole = share.blocks + share.ends + (share.routed if plan.ep < plan.cp * plan.tp else 0.0)
        parts["cp"] = (net.sent(whole * stack.reduce_bytes), net.all_reduce(whole * stack.reduce_bytes))
    if plan.dp > 1:
        apart = stride(plan, "dp", cluster.order)
        net = bus(cluster, apart, plan.dp, stack.dp_bus)
        owned = crossing(plan, share) * stack.reduce_bytes
        seconds = all_reduce(cluster, apart, plan.dp, owned, stack.dp_bus)
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
    handed = scattered(plan, cluster, stack, every) if scatters(plan) else (0.0, 0.0)
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
    found = {axis: Traffic(sent, own, own * share, own * share) for axis, (sent, own) in once.items()}
    rest = micros - 1
    for (sent, own), shows in (
        ((rest * every[0], rest * every[1]), rest * over.beside_each(every[1])),
        (back, over.beside_forward(back[1])),
    ):
        if own:
            found["shard"] += Traffic(sent, own, shows, shows)
    return found


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


def joined(some: Mapping[str, Traffic], more: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """Both, by axis."""
    return {axis: some.get(axis, Traffic()) + more.get(axis, Traffic()) for axis in {**some, **more}}
