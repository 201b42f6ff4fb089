"""Seconds and memory of any network that is dealt by dp, shard and pp: parts, one after the other.

A part takes what its products take, each at its shape, and what its other kernels move; or, where that is longer, what
the host needs to start them. Embedding tables may be dealt out by `ep` over the ranks of shard; then their results
cross by all-to-all. Gradients of tables are those of the rows that were read.
"""

from dataclasses import dataclass

from unisono.plan import Plan
from unisono.plan.grammar import choice
from unisono.planner.algorithms import all_reduce
from unisono.planner.collectives import bus, exchange, message, uncovered
from unisono.planner.kernels import chip, elementwise, matmul, soft_max
from unisono.planner.machines.cluster import Cluster, Device
from unisono.planner.machines.order import stride
from unisono.planner.memory import BUCKET, ITEM, Memory, MemoryVerdict
from unisono.planner.price import Price, Traffic, meeting, scatters
from unisono.planner.stack import Stack
from unisono.planner.timetables import WEIGHT_COPIES, chunks, idle, in_flight
from unisono.planner.work.networks import Network
from unisono.programs.balance import balance
from unisono.spec.workload import WorkPart


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one part and one micro-batch, one way. routed: of the all-to-all of its tables."""

    arithmetic: float = 0.0
    device: float = 0.0
    host: float = 0.0
    routed: float = 0.0

    @property
    def total(self) -> float:
        return soft_max(self.device + self.routed, self.host)


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One row of the pipeline: its parts, each with what it takes for a micro-batch forward, backward, and to be
    computed once more; waits: seconds for gathered weights, forward and backward."""

    parts: tuple[WorkPart, ...]
    spent: tuple[tuple[Spent, Spent, Spent], ...]
    waits: tuple[float, float]

    @property
    def forward(self) -> float:
        return sum(ahead.total for ahead, _, _ in self.spent) + self.waits[0]

    @property
    def backward(self) -> float:
        return sum(back.total + more.total for _, back, more in self.spent) + self.waits[1]

    @property
    def device(self) -> float:
        return sum(way.device for ways in self.spent for way in ways[:2])

    @property
    def again(self) -> float:
        return sum(more.device for _, _, more in self.spent)

    @property
    def arithmetic(self) -> float:
        return sum(way.arithmetic for ways in self.spent for way in ways[:2])

    @property
    def routed(self) -> float:
        return sum(way.routed for ways in self.spent for way in ways)


def cut(network: Network, rows: int) -> list[tuple[WorkPart, ...]]:
    """Consecutive parts for each row, so that the dearest row is as cheap as can be; stem and head lie outside."""
    stem, *blocks, head = network.workload.parts

    def cost(part: WorkPart) -> float:
        return _matrix(part) if network.by_weights else float(part.flops)

    ranges = balance([cost(part) for part in blocks], cost(stem), cost(head), rows)
    found = [tuple(blocks[part.start : part.stop]) for part in ranges]
    found[0] = (stem, *found[0])
    found[-1] = (*found[-1], head)
    return found


def _matrix(part: WorkPart) -> float:
    """Weights that are no tables: those are only looked up."""
    return float(part.parameters - (part.tables.elements if part.tables else 0))


def held(part: WorkPart, plan: Plan) -> float:
    """Parameters of a part on one rank before ZeRO deals them."""
    return part.parameters - (part.tables.elements * (1 - 1 / plan.ep) if part.tables else 0.0)


def updated(part: WorkPart, plan: Plan, samples: float) -> float:
    """Parameters of a part on one rank that get a gradient from `samples` samples of that rank."""
    if part.tables is None:
        return float(part.parameters)
    own = part.tables.elements / plan.ep
    return part.parameters - part.tables.elements + min(own, part.tables.touched * samples)


def _way(
    part: WorkPart, plan: Plan, cluster: Cluster, stack: Stack, samples: int, *, backward: bool
) -> Spent:
    on = chip(cluster.device, stack, plan.precision, ITEM[plan.precision])
    products = 0.0
    for rows, inner, columns, many, read, batched in part.products:
        # Another sample adds rows to a product with weights, and products where both factors are activations.
        rows, many = (rows, many * samples) if batched else (rows * samples, many)
        seen = float(read * samples) if read else None
        if not backward:
            products += matmul(on, rows, inner, columns, many, seen)
        else:
            products += matmul(on, rows, columns, inner, many) + matmul(on, inner, rows, columns, many, seen)
    # Backwards a kernel reads what came back and what was kept, and writes what goes on.
    moved = elementwise(on, part.moved * samples * on.item * (2 if backward else 1))
    routed = 0.0
    if part.tables and plan.ep > 1:
        net = exchange(cluster, stride(plan, "ep", cluster.order), plan.ep, stack.tp_bus)
        routed = net.all_to_all(part.tables.given * samples * on.item)
    host = part.kernels * stack.launch * (2 if backward else 1)
    return Spent(products, products + moved, host, routed)


def _again(part: WorkPart, forward: Spent, plan: Plan) -> Spent:
    """What is computed once more in the backward pass: all of a part between stem and head, or nothing."""
    return forward if plan.recompute == "full" and not part.tables else Spent()


def _gathering(part: WorkPart, plan: Plan, cluster: Cluster, stack: Stack) -> tuple[float, float]:
    """(bytes sent, seconds) to gather a part's weights once under zero=3; dealt tables stay where they are."""
    if plan.shard == 1 or plan.zero < 3:
        return 0.0, 0.0
    net = bus(cluster, stride(plan, "shard", cluster.order), plan.shard, stack.dp_bus)
    whole = _matrix(part) if plan.ep > 1 else float(part.parameters)
    moved = whole * ITEM[plan.precision]
    return (net.sent(moved) / 2, net.gather(moved)) if whole else (0.0, 0.0)


def row_of(
    parts: tuple[WorkPart, ...], plan: Plan, cluster: Cluster, stack: Stack, samples: int
) -> PipelineRow:
    """A row's seconds for one micro-batch of `samples`."""
    spent, fore, hind = [], 0.0, 0.0
    for part in parts:
        ahead = _way(part, plan, cluster, stack, samples, backward=False)
        back = _way(part, plan, cluster, stack, samples, backward=True)
        more = _again(part, ahead, plan)
        _, talk = _gathering(part, plan, cluster, stack)
        fore += uncovered(talk, ahead.total, stack.dp_hidden)
        hind += uncovered(2 * talk, back.total + more.total, stack.dp_hidden)
        spent.append((ahead, back, more))
    return PipelineRow(parts, tuple(spent), (fore, hind))


def rows(network: Network, plan: Plan, cluster: Cluster, stack: Stack, samples: int) -> list[PipelineRow]:
    """What each row of the pipeline takes for one micro-batch."""
    return [row_of(parts, plan, cluster, stack, samples) for parts in cut(network, plan.pp)]


def price(
    network: Network, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """A step of `micros` micro-batches on every data rank."""
    each = rows(network, plan, cluster, stack, micro_batch)
    work = [row.forward + row.backward for row in each]
    slowest, mean = max(work), sum(work) / plan.pp
    mean_f, mean_b = sum(row.forward for row in each) / plan.pp, sum(row.backward for row in each) / plan.pp
    bubble = idle(plan.schedule, plan.pp, micros, mean_f, mean_b, min(mean_f, mean_b / 2))
    pipe = _messages(each, plan, cluster, stack, micro_batch, micros)
    data = _data(each, plan, cluster, stack, micro_batch, micros)
    changed = max(sum(updated(p, plan, micro_batch * micros) for p in row.parts) for row in each) / plan.shard
    optimizer = changed * (14 + 8 * network.states) / (cluster.device.bandwidth * stack.elementwise)
    fixed = stack.step + stack.micro * micros
    step = (
        micros * slowest + bubble + pipe.exposed + sum(t.exposed for t in data.values()) + optimizer + fixed
    )

    share = micros / plan.pp
    arithmetic, device = share * sum(row.arithmetic for row in each), share * sum(row.device for row in each)
    second = share * sum(row.again for row in each)
    inside = _inside(each, plan, cluster, stack, micro_batch, share)
    comm = {"ep": inside["ep"], "pp": pipe, "shard": inside["shard"]} | data
    comm = {axis: traffic for axis, traffic in comm.items() if getattr(plan, axis) > 1}
    return Price(
        step=step,
        arithmetic=arithmetic,
        kernels=device - arithmetic,
        host=micros * mean - device - second - inside["shard"].exposed - inside["ep"].exposed,
        idle=bubble,
        uneven=micros * (slowest - mean),
        busiest=micros * slowest,
        optimizer=optimizer,
        fixed=fixed,
        comm=comm,
        recompute=second,
    )


def _inside(
    each: list[PipelineRow], plan: Plan, cluster: Cluster, stack: Stack, samples: int, share: float
) -> dict[str, Traffic]:
    """What crosses inside the passes, `share` times those of all rows: results of dealt tables, gathered weights."""
    waited, crossed = share * sum(sum(row.waits) for row in each), share * sum(row.routed for row in each)
    given = sum(part.tables.given for row in each for part in row.parts if part.tables)
    sent = 2 * share * given * samples * ITEM[plan.precision] * (plan.ep - 1) / plan.ep
    talks = [_gathering(part, plan, cluster, stack) for row in each for part in row.parts]
    weights = Traffic(3 * share * sum(b for b, _ in talks), 3 * share * sum(s for _, s in talks), waited)
    return {"ep": Traffic(sent, crossed, crossed), "shard": weights}


def sent_by(
    part: WorkPart, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> dict[str, float]:
    """Bytes that a rank sends in a step for one of its parts, by axis."""
    row = [row_of((part,), plan, cluster, stack, micro_batch)]
    found = _inside(row, plan, cluster, stack, micro_batch, micros)
    found |= _data(row, plan, cluster, stack, micro_batch, micros)
    return {axis: traffic.bytes for axis, traffic in found.items()}


def kept_by(part: WorkPart, plan: Plan) -> int:
    """Elements of one sample that a part keeps for the backward pass."""
    again = plan.recompute == "full" and part.kernels and not part.tables
    return part.output if again else part.activations


def _messages(
    each: list[PipelineRow], plan: Plan, cluster: Cluster, stack: Stack, samples: int, micros: int
) -> Traffic:
    """Of the widest boundary between two rows: the others wait for it."""
    if plan.pp == 1:
        return Traffic()
    v = chunks(plan.schedule)
    seconds = 2 * send(each, plan, cluster, stack, samples) * (micros * v + plan.pp - 1)
    return Traffic(_handed(each, plan, samples) * 2 * v * micros, seconds, seconds)


def send(each: list[PipelineRow], plan: Plan, cluster: Cluster, stack: Stack, samples: int) -> float:
    """Seconds of one message between two rows."""
    if plan.pp == 1:
        return 0.0
    return message(cluster, stride(plan, "pp", cluster.order), _handed(each, plan, samples), stack.p2p)


def _handed(each: list[PipelineRow], plan: Plan, samples: int) -> float:
    """Bytes of the widest boundary between two rows."""
    return max(row.parts[-1].output for row in each[:-1]) * samples * ITEM[plan.precision]


def _data(
    each: list[PipelineRow], plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, micros: int
) -> dict[str, Traffic]:
    """Gradients meeting on dp, and on shard below zero=3; what shows of them, shared out by their seconds. Under zero=2
    every backward pass hands over its gradients."""
    fullest = max(each, key=lambda row: sum(_matrix(part) for part in row.parts))
    dense = sum(_matrix(part) for part in fullest.parts)

    def read(samples: int) -> float:
        """Rows of tables that any rank of the group has read: all of theirs, while a table has as many."""
        return max(
            (sum(updated(p, plan, samples * plan.replicas) - _matrix(p) for p in row.parts) for row in each),
            default=0.0,
        )

    tables, parts = read(micro_batch * micros), dict[str, tuple[float, float]]()
    if plan.shard > 1 and plan.zero < 3:
        parts["shard"] = _on_shard(dense, tables, plan, cluster, stack, ITEM[plan.precision])
    if plan.dp > 1:
        apart = stride(plan, "dp", cluster.order)
        net = bus(cluster, apart, plan.dp, stack.dp_bus)
        owned = (dense / plan.shard + tables / max(1, plan.shard // plan.ep)) * stack.reduce_bytes
        seconds = all_reduce(cluster, apart, plan.dp, owned, stack.dp_bus, plan.collective)
        parts["dp"] = (net.sent(owned), seconds)
    cover = min(row.backward for row in each) / chunks(plan.schedule)
    every = _on_shard(dense, read(micro_batch), plan, cluster, stack, 0) if scatters(plan) else None
    return meeting(stack, parts, every, cover, micros)


def _on_shard(
    dense: float, tables: float, plan: Plan, cluster: Cluster, stack: Stack, after: int
) -> tuple[float, float]:
    """(bytes, seconds) to scatter the sums of gradients, and to gather weights after the update: `after` bytes of each
    element."""
    sent = seconds = 0.0
    left = plan.shard // plan.ep  # ranks of shard that hold the same tables
    apart = stride(plan, "shard", cluster.order)
    for elements, each, ranks in ((dense, apart, plan.shard), (tables, apart * plan.ep, left)):
        if ranks > 1:
            net, moved = bus(cluster, each, ranks, stack.dp_bus), elements * stack.reduce_bytes
            sent += net.sent(moved + elements * after) / 2
            seconds += net.gather(moved) + (net.gather(elements * after) if after else 0.0)
    return sent, seconds


def of_row(
    network: Network, parts: tuple[WorkPart, ...], plan: Plan, stack: Stack, *, micro_batch: int, micros: int, row: int
) -> Memory:  # fmt: skip
    """Memory of the ranks of one pipeline row."""
    item = ITEM[plan.precision]
    copies = WEIGHT_COPIES.get(choice(plan.schedule).name, 1.0)
    dense = sum(_matrix(part) for part in parts)
    tables = sum(held(part, plan) for part in parts) - dense
    read = sum(updated(part, plan, micro_batch * micros) - _matrix(part) for part in parts)
    left = max(1, plan.shard // plan.ep)
    each = item if item >= 4 else stack.grad_bytes
    states = max(item, 4) * network.states + (4 if item < 4 else 0)
    deal = {stage: (plan.shard, left) if plan.zero >= stage else (1, 1) for stage in (2, 3)}
    params = copies * item * (dense / deal[3][0] + tables / deal[3][1])
    grads = copies * each * (dense / deal[2][0] + read / deal[2][1])
    optim = states * (dense / plan.shard + tables / left)
    full = plan.recompute == "full"
    kept = [kept_by(part, plan) for part in parts]
    live = max(part.activations for part in parts) if full else 0
    flying = in_flight(plan.schedule, row, plan.pp, micros)
    activations = micro_batch * item * (sum(kept) * flying + live)
    gathered = 0.0
    if plan.shard > 1 and plan.zero == 3:
        gathered = item * 3 * max(_matrix(part) if plan.ep > 1 else part.parameters for part in parts)
    elif plan.replicas > 1:
        gathered = min(BUCKET, item * (dense + read))
    allocated = params + grads + optim + activations + gathered
    return Memory(params, grads, optim, activations, gathered, stack.slack * allocated)


def verdict(
    network: Network, plan: Plan, stack: Stack, device: Device, *, micro_batch: int, micros: int
) -> MemoryVerdict:
    """The fullest row against the device."""
    each = [
        (of_row(network, parts, plan, stack, micro_batch=micro_batch, micros=micros, row=row), row)
        for row, parts in enumerate(cut(network, plan.pp))
    ]
    memory, row = max(each, key=lambda pair: pair[0].total)
    return MemoryVerdict(row, memory, device.room)
