"""What replicas on hosts of shared cores tell each other after a backward pass: sums as they were measured, programs
played message by message, codecs by what they declare.

A codec's kernels go at the pace of elementwise ones, which was measured; what it sends is priced by the curves of the
same operations.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner.host_wire import crosses, leaving, on_wire, way_out
from unisono.planner.kinds import Model
from unisono.planner.machines.chip import Traffic
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.host import Host
from unisono.planner.machines.order import dealers, stride
from unisono.planner.source import Source
from unisono.planner.work.calls import buckets, of_call
from unisono.planner.work.coded import declared
from unisono.planner.work.passes import ITEM
from unisono.planner.work.stage import Transfer
from unisono.programs.collectives import Program
from unisono.spec.work import Work

_PLAYED = 64  # ranks of which programs are played
_CUT, _PIECES = 1 << 18, 16  # as `comm.rounds` cuts what is passed on
_ADDED = 3  # bytes that the sum of a byte reads and writes
_KERNELS = "benchmarks/codec_kernels.py: int8, int4, sign, qsgd, topk, threshold and randomk on one core, 4 Mi elements"
VECTOR: Annotated[float, Source("measured here", _KERNELS)] = 3.0  # bytes whose time one operation takes
PICKED: Annotated[float, Source("measured here", _KERNELS)] = (
    2.0  # as long for a byte where few are picked out
)


class _Met(NamedTuple):
    """One bucket. work: seconds of a rank's core; wait: seconds without work; wire: seconds on the way out of a host,
    left: the bytes there; sent: bytes that a rank sends."""

    work: float
    wait: float
    wire: float
    left: float
    sent: float


Way = Callable[[str, int, int, int], Program]


def crowded(axis: str, more: bool) -> str:
    """The name of what a call of an axis costs beside itself, where there are more ranks than cores or not: whoever is
    woken there waits until a core is free."""
    return f"{axis} crowded" if more else axis


def sent_after(plan: Plan, elements: float) -> float:
    """Bytes that a rank sends on dp for the gradients of so many elements, before `shard` deals them."""
    return 2.0 * (plan.dp - 1) / plan.dp * ITEM * elements / dealers(plan)


def data(
    model: Model, elements: float, plan: Plan, cluster: Cluster, host: Host, backward: float
) -> dict[str, Traffic]:
    """Gradients of so many elements meeting on dp after the last backward pass of the first row, which ends last."""
    if plan.dp == 1:
        return {}
    apart = stride(plan, "dp")
    near = not crosses(cluster, apart, plan.dp) and getattr(
        member("collective", plan.collective), "nearby", True
    )
    total = ITEM * elements / dealers(plan)
    sizes = buckets(total, near)
    each = [_bucket(model, plan, cluster, host, size, near) for size in sizes]
    slow = host.slow(plan.world // plan.pp)
    work = sum(one.work for one in each) * slow + sum(one.wait for one in each)
    if plan.dp < plan.world:  # curves of all ranks have it in them
        work += len(sizes) * host.calls.get(crowded("dp", plan.world > host.cores), 0.0)
    wires = [one.wire for one in each]
    # Buckets before the last cross the wire while backward goes on, on the cores that bring them there; but what is
    # dealt waits for its sum on shard.
    many = len(sizes) - 1 if plan.shard == 1 else 0
    early = sum(one.left for one in each[:many])
    if early:
        work += cluster.links[-1].work * early / cluster.links[0].size * slow
    done = 0.0
    for i, (wire, size) in enumerate(zip(wires, sizes, strict=True)):
        ready = backward if i >= many else backward * min(1.0, (sum(sizes[:i]) + size) / total)
        done = max(done, ready) + wire
    shown = work + max(0.0, done - backward)
    return {"dp": Traffic(sum(one.sent for one in each), work + sum(wires), shown)}


def _bucket(model: Model, plan: Plan, cluster: Cluster, host: Host, size: float, near: bool) -> _Met:
    """Gradients of `size` bytes."""
    if plan.codec == Plan().codec:
        op = "shared_sum" if near and host.knows("shared_sum") else "all_reduce"
        return _call(plan, cluster, host, Transfer("dp", op, size))
    made, total = declared(model, plan, ITEM, size / ITEM), _Met(0.0, 0.0, 0.0, 0.0, 0.0)
    for call in made.calls:
        one = _call(plan, cluster, host, of_call(call, plan.dp))
        total = _Met(*(a + b for a, b in zip(total, one, strict=True)))
    pace, codec = host.forward, member("codec", plan.codec)
    return total._replace(work=total.work + kernels(codec, made, pace.elementwise, pace.product))


def kernels(codec: Any, made: Work, byte: float, flop: float) -> float:
    """Seconds of a codec's own work. byte: of elementwise kernels; flop: of products of matrices."""
    moved = made.moved * byte * (PICKED if codec.sparse else 1.0)
    return moved + made.flops * (flop if codec.matrix else VECTOR * byte)


def _call(plan: Plan, cluster: Cluster, host: Host, call: Transfer) -> _Met:
    """All of one kind in a bucket."""
    apart, ranks = stride(plan, "dp"), plan.dp
    way: Way | None = getattr(member("collective", plan.collective), "program", None)
    if way is not None and ranks <= _PLAYED:
        pieces = min(_PIECES, max(1, int(call.nbytes) // _CUT))
        one = _rounds(way(call.op, ranks, 0, pieces), call.nbytes, apart, cluster, host)
    else:
        measured = "reduce_scatter" if call.op == "all_to_all" else call.op
        on = "all_reduce" if call.op == "shared_sum" else call.op
        one = _Met(
            host.talk(measured, ranks, call.nbytes),
            host.wait(measured, ranks),
            on_wire(cluster, on, apart, ranks, call.nbytes),
            leaving(cluster, on, apart, ranks, call.nbytes),
            Transfer("dp", on, call.nbytes).sent(ranks),
        )
    return _Met(*(call.times * part for part in one))


def _rounds(program: Program, nbytes: float, apart: int, cluster: Cluster, host: Host) -> _Met:
    """A program: every move is a message, which is work for who sends and who receives it, and one wait a round."""
    chunk = nbytes * (program.size if program.op == "all_to_all" else 1) / program.chunks
    own, out = [0.0] * program.size, [0.0] * program.size
    wire = left = 0.0
    node = cluster.links[0].size if way_out(cluster) else program.size * apart
    for moves in program.rounds:
        there: dict[int, float] = {}
        for move in moves:
            size = len(move.chunks) * chunk
            own[move.source] += host.talk("message", 2, size)
            own[move.to] += _ADDED * size * host.forward.elementwise if move.adds else 0.0
            out[move.source] += size
            if move.source * apart // node != move.to * apart // node:
                here = move.source * apart // node
                there[here] = there.get(here, 0.0) + size * min(node, apart)
        if there:
            wire += max(there.values()) / way_out(cluster) + cluster.links[-1].latency
            left += max(there.values())
    waits = len(program.rounds) * host.wait("message", 2)
    # The mean rank's work fills the cores that all share; where each has one, all wait for the busiest.
    busy = max(_mean(own), max(own) / host.slow(program.size))
    return _Met(busy, waits, wire, left, max(out))


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
