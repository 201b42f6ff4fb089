"""Seconds of one step of a plan: blocks, timetable, data ranks, optimiser. Closed forms; `simulate` plays the order."""

from dataclasses import dataclass, field

from unisono.plan import Plan
from unisono.planner import block, replicas
from unisono.planner.block import Dealt, Pass
from unisono.planner.collectives import Bus, bus, message
from unisono.planner.kernels import Chip, chip
from unisono.planner.memory import ITEM, layers_of, row_parameters
from unisono.planner.stack import Stack
from unisono.planner.timetables import chunks, idle
from unisono.spec.cluster import Cluster
from unisono.spec.transformer import Transformer

# Adam in mixed precision reads gradient, master, two moments and writes the last three and the weight: 4+12+12+2.
OPTIMIZER_BYTES = 30.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """One axis: bytes that a rank sends in a step, seconds that they take, seconds of them that nothing hides."""

    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step, taken apart. The parts add up to `step`.

    arithmetic: matrix products. kernels: what else the device computes. host: waiting for kernels to be started.
    idle: the timetable's bubble. uneven: what the busiest row computes beyond the mean. comm: by axis. optimizer,
    fixed: per step. Not a part: busiest, seconds in which the busiest row computes.
    """

    step: float
    arithmetic: float
    kernels: float
    host: float
    idle: float
    uneven: float
    busiest: float
    optimizer: float
    fixed: float
    comm: dict[str, Traffic] = field(default_factory=dict)

    @property
    def exposed(self) -> float:
        return sum(traffic.exposed for traffic in self.comm.values())


@dataclass(frozen=True, slots=True)
class Rows:
    """Seconds of one micro-batch on each row of the pipeline: forward, backward (with what it computes again).

    ends: of stem and head together, forward and backward. send: of one message between two rows.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    block_forward: Pass
    block_backward: Pass
    ends: float
    send: float


def rows(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> Rows:
    """What each row of the pipeline takes for one micro-batch."""
    on = chip(cluster.device, stack, plan.precision, ITEM[plan.precision])
    dealt = Dealt(
        micro_batch,
        plan.tp,
        plan.cp,
        bus(cluster, 1, plan.tp, stack.tp_bus),
        bus(cluster, plan.tp, plan.cp, stack.tp_bus),
    )
    ahead = block.forward(model, stack, on, dealt)
    mode = "full" if plan.recompute == "auto" else plan.recompute
    back = block.backward(model, stack, on, dealt) + block.again(model, stack, on, dealt, mode)
    stem = [block.stem(model, on, dealt, backward=way) for way in (False, True)]
    head = [block.head(model, stack, on, dealt, backward=way) for way in (False, True)]
    fore, hind = [], []
    gathered = _gathered(model, plan, cluster, stack, ahead.total, back.total)
    for row in range(plan.pp):
        count = layers_of(row, plan.pp, model.n_layer)
        f, b = count * (ahead.total + gathered[0]), count * (back.total + gathered[1])
        if row == 0:
            f, b = f + stem[0], b + stem[1]
        if row == plan.pp - 1:
            f, b = f + head[0], b + head[1]
        fore.append(f)
        hind.append(b)
    send = _send(model, plan, cluster, stack, micro_batch)
    return Rows(tuple(fore), tuple(hind), ahead, back, sum(stem) + sum(head), send)


def price(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """A step of `micros` micro-batches on every data rank."""
    each = rows(model, plan, cluster, stack, micro_batch)
    work = [f + b for f, b in zip(each.forward, each.backward, strict=True)]
    slowest, v = max(work), chunks(plan.schedule)
    mean_f, mean_b = sum(each.forward) / plan.pp, sum(each.backward) / plan.pp
    # Towards the weights a backward pass has the forward pass's products.
    bubble = idle(plan.schedule, plan.pp, mean_f, mean_b, min(mean_f, mean_b / 2))
    messages = 2 * each.send * ((micros if plan.pp > 1 else 0) * v + plan.pp - 1)
    messages += _tied(model, plan, cluster, stack)
    data = _data(model, plan, cluster, stack, each.backward)
    if plan.dp > 1 and not replicas.plain(plan):
        elements = sum(row_parameters(model, plan, 0)) / plan.shard
        over = replicas.Cover(min(each.backward) / v, micros * slowest, stack.dp_hidden)
        data["dp"] = Traffic(*replicas.traffic(model, plan, cluster, stack, elements, over))
    optimizer = _optimizer(model, plan, cluster, stack)
    fixed = stack.step + stack.micro * micros
    step = micros * slowest + bubble + messages + sum(t.exposed for t in data.values()) + optimizer + fixed

    layers = model.n_layer / plan.pp * micros
    passes = each.block_forward + each.block_backward
    tensor = Traffic(
        _tensor_bytes(model, plan, stack, micro_batch) * layers,
        (passes.exposed + passes.hidden) * layers,
        passes.exposed * layers,
    )
    shard = _shard_traffic(model, plan, cluster, stack, each, micros)
    on_device = passes.device * layers
    ends = micros / plan.pp * each.ends
    started = micros / plan.pp * sum(work) - on_device - ends - tensor.exposed - shard.exposed
    comm = {
        "tp": tensor,
        "pp": Traffic(_message_bytes(model, plan, stack, micro_batch) * 2 * v * micros, messages, messages),
    }
    comm |= {"shard": shard} | data
    comm = {axis: traffic for axis, traffic in comm.items() if getattr(plan, axis) > 1}
    return Price(
        step=step,
        arithmetic=passes.arithmetic * layers,
        kernels=on_device - passes.arithmetic * layers + ends,
        host=started,
        idle=bubble,
        uneven=micros * (slowest - sum(work) / plan.pp),
        busiest=micros * slowest,
        optimizer=optimizer,
        fixed=fixed,
        comm=comm,
    )


def _send(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> float:
    """Seconds of one message between stages."""
    if plan.pp == 1:
        return 0.0
    stride = plan.dp * plan.shard * plan.cp * plan.tp
    moved = _message_bytes(model, plan, stack, micro_batch)
    return message(cluster, stride, moved, stack.p2p)


def _tied(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack) -> float:
    """Seconds in which the first and the last stage sum the gradients of the weight that they share."""
    if not model.tied or plan.pp == 1:
        return 0.0
    moved = model.stem_parameters[0] / plan.tp * stack.reduce_bytes
    return message(cluster, plan.dp * plan.shard * plan.cp * plan.tp * (plan.pp - 1), moved, stack.dp_bus)


def _message_bytes(model: Transformer, plan: Plan, stack: Stack, micro_batch: int) -> float:
    whole = micro_batch * model.context / plan.cp * model.d_model * ITEM[plan.precision]
    return whole / plan.tp if stack.scatter_gather or stack.sequence_parallel else whole


def _tensor_bytes(model: Transformer, plan: Plan, stack: Stack, micro_batch: int) -> float:
    """Bytes that a rank sends on tp for one block, forward and backward."""
    whole = micro_batch * model.context / plan.cp * model.d_model * ITEM[plan.precision]
    times = 4 + (1 if stack.sequence_parallel else 0) + (2 if plan.recompute == "full" else 0)
    return times * 2.0 * (plan.tp - 1) / plan.tp * whole


def _gathered(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, ahead: float, back: float
) -> tuple[float, float]:
    """Seconds that gathering (and scattering) a block's weights shows, forward and backward, under zero=3."""
    if plan.shard == 1 or plan.zero < 3:
        return 0.0, 0.0
    net = bus(cluster, plan.cp * plan.tp, plan.shard, stack.dp_bus)
    moved = model.block_parameters[0] / plan.tp * ITEM[plan.precision]
    one = net.gather(moved)
    return _shown(one, ahead, stack), _shown(2 * one, back, stack)


def _shown(talk: float, work: float, stack: Stack) -> float:
    """What is left of `talk` beside `work`, of which the stack hides a share."""
    return max(talk * (1.0 - stack.dp_hidden), talk - work)


def _shard_traffic(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, each: Rows, micros: int
) -> Traffic:
    if plan.shard == 1 or plan.zero < 3:
        return Traffic()
    net = bus(cluster, plan.cp * plan.tp, plan.shard, stack.dp_bus)
    moved = model.block_parameters[0] / plan.tp * ITEM[plan.precision]
    layers = model.n_layer / plan.pp * micros
    shown = sum(_gathered(model, plan, cluster, stack, each.block_forward.total, each.block_backward.total))
    return Traffic(1.5 * net.sent(moved) * layers, 3 * net.gather(moved) * layers, shown * layers)


def _data(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, backward: tuple[float, ...]
) -> dict[str, Traffic]:
    """Gradients meeting on dp, and on shard below zero=3; what shows of them, shared out by their seconds."""
    blocks, ends = row_parameters(model, plan, 0)
    stride = plan.cp * plan.tp
    moved = (blocks + ends) * stack.reduce_bytes
    parts: dict[str, tuple[float, float]] = {}  # axis: bytes sent, seconds
    if plan.shard > 1 and plan.zero < 3:
        net = bus(cluster, stride, plan.shard, stack.dp_bus)
        updated = (blocks + ends) * ITEM[plan.precision]  # weights are gathered after the update
        parts["shard"] = (net.sent(moved + updated) / 2, net.gather(moved) + net.gather(updated))
    if plan.dp > 1:
        net = bus(cluster, stride * plan.shard, plan.dp, stack.dp_bus)
        owned = moved / plan.shard
        parts["dp"] = (net.sent(owned), net.all_reduce(owned))
    seconds = sum(part[1] for part in parts.values())
    # Only the last micro-batch's backward pass can hide it, and of several stages on a rank the last one's.
    cover = min(backward) / chunks(plan.schedule)
    share = max(1.0 - stack.dp_hidden, 1.0 - cover / seconds) if seconds else 0.0
    return {axis: Traffic(sent, own, own * share) for axis, (sent, own) in parts.items()}


def _optimizer(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack) -> float:
    blocks, ends = row_parameters(model, plan, 0)
    return (blocks + ends) / plan.shard * OPTIMIZER_BYTES / (cluster.device.bandwidth * stack.elementwise)


__all__ = ["Bus", "Chip", "Price", "Rows", "Traffic", "price", "rows"]
