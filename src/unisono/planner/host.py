"""The price of a plan on a host whose ranks share cores: measured paces, the timetable played on shared cores.

What differs from devices: more ranks than cores share them, so a bubble costs nothing where another rank has work;
collectives over loopback are work for the same cores, so overlap hides none of it; only a wire between hosts is
waited for without work.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.cuts import rows_of
from unisono.planner.memory import BUCKET, Memory, row_parameters, states
from unisono.planner.price import Price, Traffic
from unisono.planner.timetables import in_flight
from unisono.programs import schedules
from unisono.programs.shared import Costs, play_shared
from unisono.spec.cluster import Cluster, Source
from unisono.spec.host import Host, Pace
from unisono.spec.order import stride
from unisono.spec.transformer import Transformer

ITEM: Annotated[float, Source("specification", "bytes of fp32, in which ranks on processors compute")] = 4.0
_REDUCER = Source("specification", "our own reducer, comm.bucket: the first bucket leaves early")
FIRST_BUCKET: Annotated[float, _REDUCER] = float(1 << 20)
_FRAME = Source(
    "specification", "of 1,538 bytes of an Ethernet frame on a wire, IP and TCP with time stamps leave 1,448"
)
PAYLOAD: Annotated[float, _FRAME] = 1448 / 1538


@dataclass(frozen=True, slots=True)
class _Task:
    """One pass of one stage for one micro-batch: seconds of computing, of collectives on the cores, and of
    waiting for others and for the wire."""

    compute: float
    talk: float
    wait: float


def crowded(axis: str, more: bool) -> str:
    """The name of what a call of an axis costs beside itself, where there are more ranks than cores or not: whoever is
    woken there waits until a core is free."""
    return f"{axis} crowded" if more else axis


def counted(
    model: Transformer, micro_batch: int, tp: int, *, backward: bool, layers: float, stem: bool, head: bool
) -> Pace:
    """What one pass over `layers` blocks computes, in the units of a pace: FLOPs, bytes, operations.

    Bytes are those of the program's own kernels in fp32: norms, residual sums, activation, the heads' transposition.
    """
    n, h, k = micro_batch * model.context, model.d_model, 2.0 if backward else 1.0
    shared = 2.0 * n * h / tp  # norms and sums are dealt over tp by positions
    products = (
        2.0 * n * (h * (h + 2 * model.kv_width) + h * h + (3 if model.gated else 2) * h * model.d_ff) / tp
    )
    scores = (
        2.0 * n * model.context * h / tp * (2.0 if model.noisy else 1.0)
    )  # both products; half is masked, unless drawn
    active = (5 if model.gated else 3) if backward else (3 if model.gated else 2)
    moved = shared * (7 if backward else 5) + n * (active * model.d_ff + 2 * (h + 2 * model.kv_width)) / tp
    drawn = (n * h * 2 / tp + n * model.context * model.n_head / tp) if model.noisy and not backward else 0.0
    dealt, whole = model.block_parameters
    ends = Pace()
    if stem or head:
        ends = Pace(
            product=2.0 * k * n * h * model.vocab / tp if head else 0.0,
            elementwise=ITEM * n * h * (6 if backward else 4) * (stem + head) / tp,
            logits=ITEM * 3 * n * model.vocab / tp if head else 0.0,
            weights=ITEM * model.vocab * h / tp if head else 0.0,
            noise=n * h / tp if model.noisy and stem and not backward else 0.0,
            launch=(10.0 if backward else 6.0) / 2 * (stem + head),
        )
    return Pace(
        product=k * layers * products + ends.product,
        attention=(2.5 if backward else 1.0) * layers * scores,
        elementwise=ITEM * layers * moved + ends.elementwise,
        logits=ends.logits,
        weights=ITEM * k * layers * (dealt / tp + whole) + ends.weights,
        noise=layers * drawn + ends.noise,
        launch=(30.0 if backward else 14.0) * layers + ends.launch,
    )


def price_on_host(
    model: Transformer, plan: Plan, cluster: Cluster, *, micro_batch: int, micros: int
) -> Price:
    """A step of `micros` micro-batches on every data rank. The cluster has a host."""
    host = cluster.host
    if host is None:
        raise ValueError(f"{cluster.name} is no host of ranks")
    each = plan.world // plan.pp
    ahead, back = ([_task(model, plan, cluster, host, micro_batch, micros, row, way) for row in range(plan.pp)]
                   for way in (False, True))  # fmt: skip
    timetable = schedules.get(plan.schedule)(plan.pp, micros)
    whole = micro_batch * model.context * model.d_model / plan.tp * ITEM
    full = plan.world > host.cores
    latency = 0.0
    if plan.pp > 1:
        latency = (
            host.talk("message", 2, whole)
            + host.wait("message", 2)
            + host.calls.get(crowded("pp", full), 0.0)
        )
    wires = [_between(cluster, each, row) * each * whole / (_wire(cluster) or 1.0) for row in range(plan.pp)]

    def costs(tasks: list[_Task]) -> list[tuple[float, float]]:
        return [(t.compute + t.talk, t.wait) for t in tasks]

    given = Costs(costs(ahead), costs(back), wires, [latency] * plan.pp)
    placed = play_shared(timetable, given, each, host.slow)
    span = max(p.stop for p in placed)
    tasks = [*ahead, *back]
    stretch = host.slow(plan.world)
    compute = micros * stretch * sum(t.compute for t in tasks) / plan.pp
    talk = micros * sum(t.talk * stretch + t.wait for t in tasks) / plan.pp
    data = _data(model, plan, cluster, host, back[0].compute * host.slow(each))
    axes = _axes(model, plan, micro_batch, micros)
    inside = "shard" if axes["shard"].bytes else "tp"
    messages = micros * 2 * (latency + sum(wires) / plan.pp) if plan.pp > 1 else 0.0
    update = host.update
    tensors = 12.0 * model.n_layer / plan.pp + 4
    own = _own(model, plan, 0)
    optimizer = stretch * (update[0] + update[1] * tensors + update[2] * own / plan.shard)
    replica = plan.world // plan.dp
    optimizer += stretch * host.talk("all_reduce", replica, 4096.0) + host.wait("all_reduce", replica)
    tied = 0.0
    if model.tied and plan.pp > 1:
        tied = stretch * host.talk("all_reduce", 2, ITEM * model.vocab * model.d_model / plan.tp)
        tied += host.wait("all_reduce", 2)
        if _wire(cluster) and each * plan.pp > cluster.links[0].size:
            tied += each * ITEM * model.vocab * model.d_model / plan.tp / _wire(cluster)
    fixed = host.step * stretch + tied
    shown = sum(t.exposed for t in data.values())
    comm = {axis: Traffic(traffic.bytes) for axis, traffic in axes.items() if getattr(plan, axis) > 1}
    if inside in comm:
        comm[inside] = Traffic(comm[inside].bytes, talk, talk)
    if "pp" in comm:
        comm["pp"] = Traffic(comm["pp"].bytes, messages, 0.0)
    comm |= data
    return Price(
        step=span + shown + optimizer + fixed,
        arithmetic=compute,
        kernels=0.0,
        host=0.0,
        idle=span - compute - talk,
        uneven=0.0,
        busiest=compute + talk,
        optimizer=optimizer,
        fixed=fixed,
        comm=comm,
    )  # fmt: skip


def memory_on_host(
    model: Transformer, plan: Plan, host: Host, *, micro_batch: int, micros: int
) -> tuple[int, Memory]:
    """(row, its memory): of the fullest rank, in bytes that are resident. slack: what the process has beside."""
    rows = [_memory_of(model, plan, host, micro_batch, micros, row) for row in range(plan.pp)]
    row = max(range(plan.pp), key=lambda r: rows[r].total)
    return row, rows[row]


def _memory_of(model: Transformer, plan: Plan, host: Host, micro_batch: int, micros: int, row: int) -> Memory:
    params, optim, gathered = _weights(model, plan, row)
    moments = _moments(model, plan, micro_batch, micros, row)
    grads, activations, moving = max(moments, key=sum)
    needed = Memory(params, grads, optim, activations, gathered + moving)
    beside = host.beside(activations + gathered + moving, moved(model, plan, micro_batch))
    return replace(needed, slack=beside)


def moved(model: Transformer, plan: Plan, micro_batch: int) -> dict[str, float]:
    """The axes of a plan, and the bytes of what each gathers at once: a block's weights, a block's activations."""
    sizes = {"shard": block_of(model, plan.tp), "tp": ITEM * micro_batch * model.context * model.d_model}
    return {axis: sizes.get(axis, 0.0) for axis in ("dp", "shard", "tp", "pp") if getattr(plan, axis) > 1}


def _weights(model: Transformer, plan: Plan, row: int) -> tuple[float, float, float]:
    """Bytes of weights, of the optimiser and of what is gathered, at any moment of a pass."""
    own, (_, rim) = _own(model, plan, row), row_parameters(model, plan, row, True)
    params, _, optim = states(own, shard=plan.shard, zero=plan.zero, precision="fp32", grad_bytes=4)
    if plan.shard == 1:
        return params, optim, 0.0
    if plan.zero == 3:
        return params, optim, 2 * block_of(model, plan.tp) + ITEM * rim
    return (
        params + ITEM * own / plan.shard,
        optim,
        0.0,
    )  # the part that the optimiser steps is there beside the whole


def _moments(
    model: Transformer, plan: Plan, micro_batch: int, micros: int, row: int
) -> list[tuple[float, float, float]]:
    """(bytes of gradients, of activations, of gradients on their way) at moments of which one is the fullest: a
    backward begins, in the first micro-batch and in later ones, or the last one ends."""
    layered = kept_by_block(model, plan, micro_batch)
    layers, held = _layers(model, plan)[row], in_flight(plan.schedule, row, plan.pp, micros)
    working = _kept(model, plan, micro_batch) if plan.recompute == "full" else 0.0
    if row == plan.pp - 1:
        working += kept_by_head(model, plan, micro_batch)
    own = ITEM * _own(model, plan, row)
    # The reducer's buffer is there from the first step on, with what a rank sees of the others' when it adds up its
    # part; it takes gradients a few at a time.
    flat = (2.0 - 1.0 / plan.dp) * own / plan.shard if plan.dp > 1 else 0.0
    moving = 0.0
    if plan.shard > 1:
        moving = 2 * block_of(model, plan.tp)
    elif plan.dp > 1:
        moving = ITEM * model.d_model * max(model.d_ff, model.vocab) / plan.tp
    kept = flat + (own / (plan.shard if plan.zero > 1 else 1) if plan.shard > 1 or plan.dp == 1 else 0.0)
    last = flat + (own / plan.shard if plan.shard > 1 or plan.dp == 1 else 0.0)
    full = held * layers * layered + working
    found = [(flat, full, 0.0), (last, working, moving)]
    if micros > 1:
        found.append((kept, full - layers * layered, moving))
    if micros > held:
        found.append((kept, full, moving))
    return found


def block_of(model: Transformer, tp: int) -> float:
    """Bytes of one block's weights on one rank of tp, before `shard` deals them."""
    dealt, whole = model.block_parameters
    return ITEM * (dealt / tp + whole)


def _kept(model: Transformer, plan: Plan, micro_batch: int) -> float:
    """Bytes that one block of one micro-batch keeps for its backward pass: inputs of both norms and both sums, of every
    product, keys, queries, values, what attention gives before and after its heads are put together."""
    h, f, t = model.d_model, model.d_ff, plan.tp
    whole = 2 * h / t + 2 * h  # under tp, what products read is gathered first
    dealt = (h + 2 * model.kv_width + 3 * h + (3 if model.gated else 2) * f) / t
    scores = 3 * model.n_head * model.context / t if model.noisy else 0.0
    return ITEM * micro_batch * model.context * (whole + dealt + scores)


def _task(
    model: Transformer,
    plan: Plan,
    cluster: Cluster,
    host: Host,
    micro_batch: int,
    micros: int,
    row: int,
    backward: bool,
) -> _Task:
    """One pass of one row."""
    layers = _layers(model, plan)[row]
    stem, head = row == 0, row == plan.pp - 1
    ends = {"layers": layers, "stem": stem, "head": head}
    work = counted(model, micro_batch, plan.tp, backward=backward, **ends)  # type: ignore[arg-type]
    compute = (host.backward if backward else host.forward).of(work)
    again = plan.recompute == "full" and backward
    if again:
        compute += host.forward.of(
            counted(model, micro_batch, plan.tp, backward=False, layers=layers, stem=False, head=False)
        )
    talk = wait = 0.0
    full = plan.world > host.cores
    for axis, op, nbytes, times in calls_of_pass(
        model, plan, micro_batch, micros, layers, (stem, head), backward, again
    ):
        ranks = getattr(plan, axis)
        apart = stride(plan, axis)
        key = crowded(axis, full)
        beside = host.calls.get(key, 0.0) + nbytes * host.copies.get(key, 0.0)
        talk += times * (host.talk(op, ranks, nbytes) + beside)
        wait += times * (host.wait(op, ranks) + _on_wire(cluster, plan, op, apart, ranks, nbytes))
    return _Task(compute, talk, wait)


def calls_of_pass(
    model: Transformer, plan: Plan, micro_batch: int, micros: int, layers: float, ends: tuple[bool, bool],
    backward: bool, again: bool,
) -> list[tuple[str, str, float, float]]:  # fmt: skip
    """(axis, operation, bytes in all, how often): the collectives inside one pass, as the program makes them. ends:
    whether stem and head are here. again: the forward pass is computed once more on the way."""
    stem, head = ends
    found: list[tuple[str, str, float, float]] = []
    if plan.tp > 1:
        moved = micro_batch * model.context * model.d_model * ITEM
        tokens = micro_batch * model.context * ITEM
        pairs = 2.0 * layers * (2 if again else 1)
        gathers = 2 if model.gated else 1  # gate and up gather their input each
        first = layers * (1 + gathers)
        stems, heads = float(stem), float(head)
        gather = pairs + stems if backward else first + heads
        scatter = first + heads if backward else pairs + stems
        found += [("tp", "all_gather", moved, gather), ("tp", "reduce_scatter", moved, scatter)]
        if head and not backward:
            found.append(("tp", "all_reduce", tokens, 2.0))
    if plan.shard > 1:
        block = block_of(model, plan.tp)
        rim = ITEM * row_parameters(model, plan, 0 if stem else plan.pp - 1, True)[1] if stem or head else 0.0
        once = 1.0 / micros
        if not backward:
            gathers = 1.0 if plan.zero == 3 else once
            found += [("shard", "all_gather", block, layers * gathers), ("shard", "all_gather", rim, gathers)]
        else:
            scatters = once if plan.zero == 1 else 1.0
            if plan.zero == 3:
                found.append(("shard", "all_gather", block, layers))
            found += [
                ("shard", "reduce_scatter", block, layers * scatters),
                ("shard", "reduce_scatter", rim, scatters),
            ]
    return [call for call in found if call[2] * call[3] > 0]


def _layers(model: Transformer, plan: Plan) -> tuple[float, ...]:
    """Blocks of each row, as the program cuts: where the dearest row is cheapest."""
    return rows_of(model, plan.schedule, plan.pp, True)


def _own(model: Transformer, plan: Plan, row: int) -> float:
    """Parameters of one rank of a row, before `shard` deals them."""
    return sum(row_parameters(model, plan, row, True))


def _data(
    model: Transformer, plan: Plan, cluster: Cluster, host: Host, backward: float
) -> dict[str, Traffic]:
    """Gradients meeting on dp after the last backward pass of the first row, which ends last."""
    if plan.dp == 1:
        return {}
    apart = stride(plan, "dp")
    near = not _crosses(cluster, apart, plan.dp)
    op = "shared_sum" if near and host.knows("shared_sum") else "all_reduce"
    sizes, total = _sizes(model, plan, near), ITEM * _own(model, plan, 0) / plan.shard
    active = plan.world // plan.pp
    work = sum(host.talk(op, plan.dp, size) for size in sizes) * host.slow(active)
    work += len(sizes) * host.wait(op, plan.dp)
    if plan.dp < plan.world:  # curves of all ranks have it in them
        work += len(sizes) * host.calls.get(crowded("dp", plan.world > host.cores), 0.0)
    wires = [_on_wire(cluster, plan, "all_reduce", apart, plan.dp, size) for size in sizes]
    # Buckets before the last cross the wire while backward goes on.
    done = 0.0
    for i, (wire, size) in enumerate(zip(wires, sizes, strict=True)):
        ready = backward if i == len(sizes) - 1 else backward * min(1.0, (sum(sizes[:i]) + size) / total)
        done = max(done, ready) + wire
    seconds = work + sum(wires)
    shown = work + max(0.0, done - backward)
    return {"dp": Traffic(sent_after(plan, _own(model, plan, 0)), seconds, shown)}


def buckets(model: Transformer, plan: Plan) -> int:
    """How many of them meet on dp, on the first row, where all ranks are on one host."""
    return len(_sizes(model, plan, True))


def _sizes(model: Transformer, plan: Plan, near: bool) -> list[float]:
    """Bytes of each. What is sharded leaves when backward is over, and so does the last one. near: in memory that all
    ranks see, where there is one."""
    total = ITEM * _own(model, plan, 0) / plan.shard
    if near:
        return [total]
    early = FIRST_BUCKET if plan.shard == 1 and total > FIRST_BUCKET else 0.0
    sizes, left = ([early] if early else []), total - early
    while left > 0:
        sizes.append(min(BUCKET, left))
        left -= sizes[-1]
    return sizes


def sent_inside(
    model: Transformer, plan: Plan, micro_batch: int, micros: int, layers: float, ends: tuple[bool, bool]
) -> dict[str, float]:
    """Bytes that a rank sends on tp and shard in a step for `layers` blocks, and for stem and head if they are here."""
    moved: dict[str, float] = {"tp": 0.0, "shard": 0.0}
    for backward in (False, True):
        again = plan.recompute == "full" and backward
        for axis, op, nbytes, times in calls_of_pass(
            model, plan, micro_batch, micros, layers, ends, backward, again
        ):
            n = getattr(plan, axis)
            moved[axis] += micros * times * nbytes * (n - 1) / n * (2 if op == "all_reduce" else 1)
    return moved


def sent_after(plan: Plan, elements: float) -> float:
    """Bytes that a rank sends on dp for the gradients of so many elements, before `shard` deals them."""
    return 2.0 * (plan.dp - 1) / plan.dp * ITEM * elements / plan.shard


def kept_by_block(model: Transformer, plan: Plan, micro_batch: int) -> float:
    """Bytes that one block of one micro-batch keeps from its forward to its backward pass."""
    if plan.recompute == "full":
        return ITEM * micro_batch * model.context * model.d_model / plan.tp
    return _kept(model, plan, micro_batch)


def kept_by_head(model: Transformer, plan: Plan, micro_batch: int) -> float:
    """Bytes of one micro-batch's logits, their log-probabilities and the gradient of these."""
    return 3.0 * ITEM * micro_batch * model.context * model.vocab / plan.tp


def _axes(model: Transformer, plan: Plan, micro_batch: int, micros: int) -> dict[str, Traffic]:
    """Bytes that a rank sends in a step inside its replica."""
    both = (plan.pp == 1, plan.pp == 1)
    moved = sent_inside(model, plan, micro_batch, micros, model.n_layer / plan.pp, both)
    whole = micro_batch * model.context * model.d_model / plan.tp * ITEM
    moved["pp"] = 2.0 * micros * whole * (plan.pp - 1) / plan.pp
    return {axis: Traffic(nbytes) for axis, nbytes in moved.items()}


def _wire(cluster: Cluster) -> float:
    """Payload bytes a second of a host's way out, where there is more than one host; else 0."""
    if len(cluster.links) < 2:
        return 0.0
    return cluster.links[-1].bandwidth * PAYLOAD * cluster.links[0].size


def _crosses(cluster: Cluster, apart: int, ranks: int) -> bool:
    """Whether a group of so many ranks, `apart` from each other, lies on more than one host."""
    return bool(_wire(cluster)) and ranks > 1 and apart * ranks > cluster.links[0].size


def _on_wire(cluster: Cluster, plan: Plan, op: str, apart: int, ranks: int, nbytes: float) -> float:
    """Seconds on the way out of a host for one collective, while the other groups of the same axis do theirs."""
    rate, node = _wire(cluster), cluster.links[0].size if cluster.links else 1
    if not _crosses(cluster, apart, ranks):
        return 0.0
    here = max(1, node // apart)  # members of a group on one host
    groups = min(node, apart)  # of that axis which go through the same way out
    if op == "all_reduce":
        sent = 2.0 * (ranks - 1) / ranks * nbytes
    elif op == "all_gather":
        sent = (ranks - 1) / ranks * nbytes
    else:  # an exchange of parts: every member sends a part to each one outside
        sent = here * (ranks - here) / ranks * nbytes
    return groups * sent / rate + cluster.links[-1].latency


def _between(cluster: Cluster, each: int, row: int) -> float:
    """1.0 where the ranks of a row and of the next one are on two hosts."""
    node = cluster.links[0].size if cluster.links else 1
    return float(bool(_wire(cluster)) and (row + 1) * each % node == 0)


__all__ = ["buckets", "calls_of_pass", "counted", "crowded", "memory_on_host", "moved", "price_on_host"]
