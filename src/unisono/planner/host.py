"""The price of a plan on a host whose ranks share cores: measured paces, the timetable played on shared cores.

What differs from devices: more ranks than cores share them, so a bubble costs nothing where another rank has work;
collectives over loopback are work for the same cores, so overlap hides none of it; only a wire between hosts is
waited for without work.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.host_memory import ITEM, block_of, layers_of, own_of
from unisono.planner.host_wire import between, crosses, leaving, on_wire, way_out
from unisono.planner.machines.cluster import Cluster, Source
from unisono.planner.machines.host import Host, Pace
from unisono.planner.machines.order import stride
from unisono.planner.memory import BUCKET, share_of
from unisono.planner.price import Price, Traffic
from unisono.planner.timetables import chunks, copies
from unisono.planner.timetables import ends as ends_of
from unisono.planner.work.transformer import Transformer
from unisono.programs.pipeline import Placed
from unisono.programs.schedules import SCHEDULES
from unisono.programs.shared import SharedCosts, play_shared

_REDUCER = Source("specification", "our own reducer, train.departures: the first bucket leaves early")
FIRST_BUCKET: Annotated[float, _REDUCER] = float(1 << 20)


@dataclass(frozen=True, slots=True)
class _Task:
    """One pass of one stage for one micro-batch: seconds of computing; by axis, of collectives on the cores, and of
    waiting for others and for the wire. On pp that is a core's for posting messages and starting again after a wait."""

    compute: float
    talk: Mapping[str, float]
    waits: Mapping[str, float]

    @property
    def work(self) -> float:
        """Seconds of a core."""
        return self.compute + sum(self.talk.values())

    @property
    def wait(self) -> float:
        return sum(self.waits.values())


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


@dataclass(frozen=True, slots=True)
class _Played:
    """A step's passes, by stage, and when each runs; how many micro-batches pass a stage; seconds of one message beside
    its wire and on it, by stage."""

    ahead: list[_Task]
    back: list[_Task]
    passes: list[int]
    late: list[float]
    wires: list[float]
    placed: list[Placed]

    def summed(self, part: Callable[[_Task], float]) -> float:
        """Of a step, on all rows together."""
        return sum(
            many * (part(ahead) + part(back))
            for many, ahead, back in zip(self.passes, self.ahead, self.back, strict=True)
        )


def _played(
    model: Transformer, plan: Plan, cluster: Cluster, host: Host, micro_batch: int, micros: int
) -> _Played:
    each, timetable = plan.world // plan.pp, SCHEDULES.read(plan.schedule).timetable(plan.pp, micros)
    rows, last = layers_of(model, plan), timetable.length - 1
    parts = [
        (rows[row] / chunks(plan.schedule), stage % timetable.length)
        for stage, row in enumerate(timetable.placement)
    ]
    ahead, back = (
        [
            _task(model, plan, cluster, host, (micro_batch, micros), layers, (place == 0, place == last), way)
            for layers, place in parts
        ]
        for way in (False, True)
    )
    whole = micro_batch * model.context * model.d_model / plan.tp * ITEM
    latency = host.talk("message", 2, whole) + host.wait("message", 2) if plan.pp > 1 else 0.0
    across = each // plan.dp * whole / (way_out(cluster) or 1.0)
    neighbours = zip(timetable.placement, (*timetable.placement[1:], timetable.placement[0]), strict=True)
    wires = [across * between(cluster, each, row, other) for row, other in neighbours]
    late = [latency + (cluster.links[-1].latency if wire else 0.0) for wire in wires]
    # Towards the weights a backward pass has the forward pass's products.
    later = [
        min(f.compute, b.compute / 2) * timetable.splits_backward for f, b in zip(ahead, back, strict=True)
    ]
    given = SharedCosts(
        [(t.work, t.wait) for t in ahead],
        [(t.work - w, t.wait) for t, w in zip(back, later, strict=True)],
        wires,
        late,
        [(w, 0.0) for w in later],
    )
    passes = [len(timetable.micros_of(stage)) for stage in range(timetable.stages)]
    # Replicas meet at the step's end; where they share no wire they stay in step until then.
    lanes = plan.dp if any(wires) else 1
    placed = play_shared(timetable, given, each // lanes, host.slow, lanes)
    return _Played(ahead, back, passes, late, wires, placed)


def placed_on_host(
    model: Transformer, plan: Plan, cluster: Cluster, *, micro_batch: int, micros: int
) -> list[Placed]:
    """When each pass of each row runs, in the step that `price_on_host` prices. The cluster has a host."""
    return _played(model, plan, cluster, _host_of(cluster), micro_batch, micros).placed


def _host_of(cluster: Cluster) -> Host:
    if cluster.host is None:
        raise ValueError(f"{cluster.name} is no host of ranks")
    return cluster.host


def price_on_host(
    model: Transformer, plan: Plan, cluster: Cluster, *, micro_batch: int, micros: int
) -> Price:
    """A step of `micros` micro-batches on every data rank. The cluster has a host."""
    host, each = _host_of(cluster), plan.world // plan.pp
    got = _played(model, plan, cluster, host, micro_batch, micros)
    span, busy = max(p.stop for p in got.placed), [0.0] * plan.pp
    for p in got.placed:
        busy[p.row] += p.stop - p.start
    # How much longer work takes on cores that are shared, in the mean over the step.
    stretch = (sum(busy) - got.summed(lambda task: task.wait)) / got.summed(lambda task: task.work)
    crowd, inside = host.slow(plan.world), _inside(model, plan, got, stretch, micro_batch, micros)
    data = _data(model, plan, cluster, host, got.back[0].compute * host.slow(each))
    fixed, replica = host.step * crowd + _tied(model, plan, cluster, host), plan.world // plan.dp
    update = host.update
    tensors, own = model.block_tensors * model.n_layer / plan.pp + END_TENSORS, own_of(model, plan, 0)
    optimizer = crowd * (update[0] + update[1] * tensors + update[2] * own / plan.shard)
    optimizer += crowd * host.talk("all_reduce", replica, 4096.0) + host.wait("all_reduce", replica)
    return Price(
        step=span + sum(t.exposed for t in data.values()) + optimizer + fixed,
        arithmetic=stretch * got.summed(lambda task: task.compute) / plan.pp,
        kernels=0.0,
        host=0.0,
        idle=span - max(busy),
        uneven=max(busy) - sum(busy) / plan.pp,
        busiest=max(busy),
        optimizer=optimizer,
        fixed=fixed,
        comm={axis: traffic for axis, traffic in inside.items() if getattr(plan, axis) > 1} | data,
    )


def _inside(
    model: Transformer, plan: Plan, got: _Played, stretch: float, micro_batch: int, micros: int
) -> dict[str, Traffic]:
    """What the passes of a step send, and what of it shows, of the mean row."""
    both = (plan.pp == 1, plan.pp == 1)
    moved = sent_inside(model, plan, micro_batch, micros, model.n_layer / plan.pp, both)
    whole = micro_batch * model.context * model.d_model / plan.tp * ITEM
    moved["pp"] = 2.0 * micros * whole * (plan.pp - 1) / plan.pp
    late = 0.0
    if plan.pp > 1:
        each = zip(got.passes, got.late, got.wires, strict=True)
        late = 2 * sum(many * (late + wire) for many, late, wire in each) / plan.pp
    found: dict[str, Traffic] = {}
    for axis, nbytes in moved.items():
        talk = stretch * got.summed(lambda task, axis=axis: task.talk.get(axis, 0.0))
        shown = (talk + got.summed(lambda task, axis=axis: task.waits.get(axis, 0.0))) / plan.pp
        found[axis] = Traffic(nbytes, shown + late * (axis == "pp"), shown)
    return found


def _tied(model: Transformer, plan: Plan, cluster: Cluster, host: Host) -> float:
    """Seconds in which two rows sum the gradients that both have."""
    moved, each = _twice(model, plan), plan.world // plan.pp
    if not moved:
        return 0.0
    found = host.slow(plan.world) * host.talk("all_reduce", 2, moved) + host.wait("all_reduce", 2)
    if way_out(cluster) and plan.world > cluster.links[0].size:
        found += each * moved / way_out(cluster)
    return found


_ENDS = Source("specification", "parameters of stem and head of our GPT, counted as tensors")
END_TENSORS: Annotated[int, _ENDS] = 3


def _twice(model: Transformer, plan: Plan) -> float:
    """Bytes of gradients that two rows sum: of a tied weight whose ends lie apart, of all that DualPipe has twice."""
    if plan.pp == 1:
        return 0.0
    if copies(plan.schedule) > 1:
        return ITEM * own_of(model, plan, 0)
    stems, heads = ends_of(plan.schedule, plan.pp)
    return ITEM * model.vocab * model.d_model / plan.tp if model.tied and stems != heads else 0.0


def _task(
    model: Transformer, plan: Plan, cluster: Cluster, host: Host, sizes: tuple[int, int], layers: float,
    rim: tuple[bool, bool], backward: bool,
) -> _Task:  # fmt: skip
    """One pass of one stage. sizes: of a micro-batch, and how many; rim: whether stem and head are there."""
    (micro_batch, micros), (stem, head) = sizes, rim
    given = {"layers": layers, "stem": stem, "head": head}
    work = counted(model, micro_batch, plan.tp, backward=backward, **given)  # type: ignore[arg-type]
    compute = (host.backward if backward else host.forward).of(work)
    again = plan.recompute == "full" and backward
    if again:
        compute += host.forward.of(
            counted(model, micro_batch, plan.tp, backward=False, layers=layers, stem=False, head=False)
        )
    talk, waits, full = dict[str, float](), dict[str, float](), plan.world > host.cores
    for axis, op, nbytes, times in calls_of_pass(
        model, plan, micro_batch, micros, layers, (stem, head), backward, again
    ):
        ranks, key = getattr(plan, axis), crowded(axis, full)
        beside = host.calls.get(key, 0.0) + nbytes * host.copies.get(key, 0.0)
        moves = host.talk(op, ranks, nbytes)
        # Cores hand on what comes while the wire brings more: it is waited for beyond that.
        wire = max(0.0, on_wire(cluster, op, stride(plan, axis), ranks, nbytes) - moves)
        talk[axis] = talk.get(axis, 0.0) + times * (moves + beside)
        waits[axis] = waits.get(axis, 0.0) + times * (host.wait(op, ranks) + wire)
    if plan.pp > 1:
        talk["pp"] = ((not stem) + (not head)) * host.calls.get(crowded("pp", full), 0.0)
    return _Task(compute, talk, waits)


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
        gathers = 2 if model.gated else 1  # gate and up gather their input each
        first, second = layers * (1.0 + gathers), layers * 2.0  # what a forward pass gathers, and scatters
        stems, heads = float(stem), float(head)
        gather, scatter = (second + stems, first + heads) if backward else (first + heads, second + stems)
        if again:  # up to the last tensor that is kept, which comes before what the second half scatters
            gather, scatter = gather + first, scatter + layers
        found += [("tp", "all_gather", moved, gather), ("tp", "reduce_scatter", moved, scatter)]
        if head and not backward:  # of the loss: largest logit, sum, the target's
            found.append(("tp", "all_reduce", tokens, 3.0))
        if backward:  # gradients of what every rank has whole
            whole = layers * model.block_parameters[1]
            whole += stems * model.stem_parameters[1] + heads * model.head_parameters[1]
            found.append(("tp", "all_reduce", ITEM * whole, 1.0 / micros))
    if plan.shard > 1:
        block = block_of(model, plan.tp)
        rim = ITEM * share_of(model, plan, 0 if stem else plan.pp - 1, True).ends if stem or head else 0.0
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


def _data(
    model: Transformer, plan: Plan, cluster: Cluster, host: Host, backward: float
) -> dict[str, Traffic]:
    """Gradients meeting on dp after the last backward pass of the first row, which ends last."""
    if plan.dp == 1:
        return {}
    apart = stride(plan, "dp")
    near = not crosses(cluster, apart, plan.dp)
    op = "shared_sum" if near and host.knows("shared_sum") else "all_reduce"
    sizes, total = _sizes(model, plan, near), ITEM * own_of(model, plan, 0) / plan.shard
    active = plan.world // plan.pp
    work = sum(host.talk(op, plan.dp, size) for size in sizes) * host.slow(active)
    work += len(sizes) * host.wait(op, plan.dp)
    if plan.dp < plan.world:  # curves of all ranks have it in them
        work += len(sizes) * host.calls.get(crowded("dp", plan.world > host.cores), 0.0)
    wires = [on_wire(cluster, "all_reduce", apart, plan.dp, size) for size in sizes]
    # Buckets before the last cross the wire while backward goes on, on the cores that bring them there.
    early = sum(leaving(cluster, "all_reduce", apart, plan.dp, size) for size in sizes[:-1])
    if early:
        work += cluster.links[-1].work * early / cluster.links[0].size * host.slow(active)
    done = 0.0
    for i, (wire, size) in enumerate(zip(wires, sizes, strict=True)):
        ready = backward if i == len(sizes) - 1 else backward * min(1.0, (sum(sizes[:i]) + size) / total)
        done = max(done, ready) + wire
    seconds = work + sum(wires)
    shown = work + max(0.0, done - backward)
    return {"dp": Traffic(sent_after(plan, own_of(model, plan, 0)), seconds, shown)}


def buckets(model: Transformer, plan: Plan) -> int:
    """How many of them meet on dp, on the first row, where all ranks are on one host."""
    return len(_sizes(model, plan, True))


def _sizes(model: Transformer, plan: Plan, near: bool) -> list[float]:
    """Bytes of each. What is sharded leaves when backward is over, and so does the last one. near: in memory that all
    ranks see, where there is one."""
    total = ITEM * own_of(model, plan, 0) / plan.shard
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
