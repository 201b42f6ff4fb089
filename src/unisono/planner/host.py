"""The price of a plan on a host whose ranks share cores: measured paces, the timetable played on shared cores.

What differs from devices: more ranks than cores share them, so a bubble costs nothing where another rank has work;
collectives over loopback are work for the same cores, so overlap hides none of it; only a wire between hosts is
waited for without work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner.host_data import crowded
from unisono.planner.host_data import data as host_data
from unisono.planner.host_memory import memory_on_host
from unisono.planner.host_wire import between, on_wire, way_out
from unisono.planner.kinds import Model, kind
from unisono.planner.machines.chip import Traffic
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.host import Host
from unisono.planner.machines.order import dealers, stride
from unisono.planner.memory import MemoryVerdict
from unisono.planner.parts import Price
from unisono.planner.question import Question
from unisono.planner.timetables import copies
from unisono.planner.work.passes import ITEM
from unisono.planner.work.stage import StageWork, Transfer
from unisono.programs.pipeline import Placed, Timetable
from unisono.programs.schedules import SCHEDULES
from unisono.programs.shared import SharedCosts, play_shared
from unisono.spec.fidelity import Fidelity

screened = ordered = False


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


def _played(works: tuple[StageWork, ...], plan: Plan, cluster: Cluster, host: Host, micros: int) -> _Played:
    each, timetable = plan.world // plan.pp, SCHEDULES.read(plan.schedule).timetable(plan.pp, micros)
    last = timetable.length - 1
    made: dict[tuple[int, int, bool], _Task] = {}  # stages that do the same in the same place take the same

    def task(stage: int, backward: bool) -> _Task:
        place = stage % timetable.length
        ends = (place > 0) + (place < last)
        key = id(works[stage]), ends, backward
        if key not in made:
            made[key] = _task(works[stage], plan, cluster, host, ends, backward)
        return made[key]

    ahead, back = ([task(stage, way) for stage in range(timetable.stages)] for way in (False, True))
    neighbours = zip(timetable.placement, (*timetable.placement[1:], timetable.placement[0]), strict=True)
    late, wires = list[float](), list[float]()
    for work, (row, other) in zip(works, neighbours, strict=True):
        whole = work.handed
        across = each // plan.dp * whole / (way_out(cluster) or 1.0)
        wires.append(across * between(cluster, each, row, other))
        latency = host.talk("message", 2, whole) + host.wait("message", 2) if plan.pp > 1 else 0.0
        late.append(latency + (cluster.links[-1].latency if wires[-1] else 0.0))
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


def placed(ask: Question, timetable: Timetable) -> list[Placed]:
    """When each pass of each row runs, in the step that is priced."""
    works = kind(ask.model).stages(ask.model, ask.plan, ask.micro_batch, ask.micros)
    return _played(works, ask.plan, ask.cluster, _host_of(ask.cluster), ask.micros).placed


def price(ask: Question) -> Price:
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    return price_on_host(ask.model, ask.plan, ask.cluster, **sizes)


closed = price  # it has no other form than the timetable, played on the cores that there are


def verdict(ask: Question) -> MemoryVerdict:
    """Ranks on one host share its memory."""
    host, where, sizes = (
        _host_of(ask.cluster),
        ask.cluster,
        {"micro_batch": ask.micro_batch, "micros": ask.micros},
    )
    row, held = memory_on_host(ask.model, ask.plan, host, **sizes)
    ranks = min(ask.plan.world, where.links[0].size if where.links else 1)
    return MemoryVerdict(row, held, where.device.memory * host.cores / ranks)


def layers(ask: Question) -> tuple[float, ...]:
    return kind(ask.model).layers(ask.model, ask.plan, True)


def modes(ask: Question) -> tuple[str, ...]:
    """Our own attention keeps no scores that could be left out."""
    return ("none",)


def unmeasured(plan: Plan) -> tuple[str, ...]:
    """Paces and bytes are those of fp32, and those of other precisions follow from none of them; how policies wait for
    each other was not measured."""
    policy = member("sync", plan.sync)
    lossy = plan.dp > 1 and getattr(policy, "fidelity", None) is Fidelity.LOSSY
    return ("precision", *(("sync",) if lossy else ()))


def error(ask: Question) -> float:
    """Mean relative error of a step's seconds."""
    return _host_of(ask.cluster).error


def _host_of(cluster: Cluster) -> Host:
    if cluster.host is None:
        raise ValueError(f"{cluster.name} is no host of ranks")
    return cluster.host


def price_on_host(model: Model, plan: Plan, cluster: Cluster, *, micro_batch: int, micros: int) -> Price:
    """A step of `micros` micro-batches on every data rank. The cluster has a host."""
    host, each = _host_of(cluster), plan.world // plan.pp
    works = kind(model).stages(model, plan, micro_batch, micros)
    first = kind(model).row_works(model, plan, micro_batch, micros)[0]
    got = _played(works, plan, cluster, host, micros)
    span, busy = max(p.stop for p in got.placed), [0.0] * plan.pp
    for p in got.placed:
        busy[p.row] += p.stop - p.start
    # How much longer work takes on cores that are shared, in the mean over the step.
    stretch = (sum(busy) - got.summed(lambda task: task.wait)) / got.summed(lambda task: task.work)
    crowd, inside = host.slow(plan.world), _inside(works, plan, got, stretch, micros)
    data = host_data(model, first.elements, plan, cluster, host, got.back[0].compute * host.slow(each))
    twice = _twice(kind(model).tied(model, plan), first.elements, plan)
    fixed, replica = host.step * crowd + _tied(twice, plan, cluster, host), plan.world // plan.dp
    update = host.update
    optimizer = crowd * (
        update[0]
        + update[1] * first.tensors
        + update[2] * first.elements / dealers(plan) * _moved(model.states)
    )
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


def _moved(states: int) -> float:
    """Bytes that an element's update reads and writes, beside those of Adam, which was measured: weight and gradient
    are read, the weight written; each moment is read and written."""
    return (3 + 2 * states) / (3 + 2 * 2)


def _inside(
    works: tuple[StageWork, ...], plan: Plan, got: _Played, stretch: float, micros: int
) -> dict[str, Traffic]:
    """What the passes of a step send, and what of it shows, of the mean row."""
    moved = {axis: nbytes / plan.pp for axis, nbytes in sent_inside(works, plan, got.passes).items()}
    late, last = 0.0, len(works) // copies_of(plan) - 1
    if plan.pp > 1:
        each = zip(got.passes, got.late, got.wires, strict=True)
        late = 2 * sum(many * (late + wire) for many, late, wire in each) / plan.pp
        handed = [work.handed * many for work, many in zip(works, got.passes, strict=True)]
        moved["pp"] = 2.0 * sum(size for i, size in enumerate(handed) if i % (last + 1) < last) / plan.pp
    found: dict[str, Traffic] = {}
    for axis, nbytes in moved.items():
        talk = stretch * got.summed(lambda task, axis=axis: task.talk.get(axis, 0.0))
        shown = (talk + got.summed(lambda task, axis=axis: task.waits.get(axis, 0.0))) / plan.pp
        found[axis] = Traffic(nbytes, shown + late * (axis == "pp"), shown)
    return found


def copies_of(plan: Plan) -> int:
    """How often the whole model is in the pipeline."""
    return int(copies(plan.schedule, plan.pp))


def _tied(moved: float, plan: Plan, cluster: Cluster, host: Host) -> float:
    """Seconds in which two rows sum the gradients that both have, `moved` bytes."""
    if not moved:
        return 0.0
    found = host.slow(plan.world) * host.talk("all_reduce", 2, moved) + host.wait("all_reduce", 2)
    if way_out(cluster) and plan.world > cluster.links[0].size:
        found += plan.world // plan.pp * moved / way_out(cluster)
    return found


def _twice(tied: float, elements: float, plan: Plan) -> float:
    """Bytes of gradients that two rows sum: of a tied weight whose ends lie apart, of all that DualPipe has twice."""
    if plan.pp == 1:
        return 0.0
    return ITEM * elements if copies_of(plan) > 1 else tied


def _task(
    work: StageWork, plan: Plan, cluster: Cluster, host: Host, neighbours: int, backward: bool
) -> _Task:  # fmt: skip
    """One pass of one stage, which hands over to so many neighbours."""
    counts, calls = work.pass_of(backward)
    compute = (host.backward if backward else host.forward).of(counts)
    if backward:
        compute += host.forward.of(work.again)
    talk, waits, full = dict[str, float](), dict[str, float](), plan.world > host.cores
    for call in calls:
        axis, ranks = _axis(call), call.ranks(plan)
        op, among, nbytes, times = _played_as(call, ranks)
        key = crowded(axis if axis in host.calls else "tp", full)
        beside = host.calls.get(key, 0.0) + nbytes * host.copies.get(key, 0.0)
        moves = host.talk(op, among, nbytes)
        # Cores hand on what comes while the wire brings more: it is waited for beyond that.
        wire = max(0.0, on_wire(cluster, op, stride(plan, _apart(call)), ranks, nbytes) - moves)
        talk[axis] = talk.get(axis, 0.0) + times * (moves + beside)
        waits[axis] = waits.get(axis, 0.0) + times * (host.wait(op, among) + wire)
    if plan.pp > 1:
        talk["pp"] = neighbours * host.calls.get(crowded("pp", full), 0.0)
    return _Task(compute, talk, waits)


def _axis(call: Transfer) -> str:
    """The axis that a call is told under: ranks that share experts are tp's where nothing is dealt by ep."""
    if call.axis.startswith("cp"):
        return "cp"
    return call.axis if call.axis in ("tp", "shard", "ep") else "tp"


def _apart(call: Transfer) -> str:
    """By what neighbours among its ranks lie apart."""
    return call.axis if call.axis in ("row", "column") else _axis(call)


def _played_as(call: Transfer, ranks: int) -> tuple[str, int, float, float]:
    """(what was measured, of how many ranks, its bytes, how often): a ring is messages of a part, and an exchange
    is what a reduce-scatter is made of."""
    if call.op == "ring":
        return "message", 2, call.nbytes / ranks, call.times * (ranks - 1)
    return ("reduce_scatter" if call.op == "all_to_all" else call.op), ranks, call.nbytes, call.times


def sent_inside(works: Sequence[StageWork], plan: Plan, passes: Sequence[int]) -> dict[str, float]:
    """Bytes that ranks of all rows, one of each, send inside passes in a step. passes: of each stage."""
    moved: dict[str, float] = {"tp": 0.0, "cp": 0.0, "ep": 0.0, "shard": 0.0}
    for work, many in zip(works, passes, strict=True):
        for call in (*work.calls[0], *work.calls[1]):
            moved[_axis(call)] += many * call.times * call.sent(call.ranks(plan))
    return moved
