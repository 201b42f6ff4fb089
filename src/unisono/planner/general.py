"""Seconds and memory of a network of parts, which is spread by dp, shard and pp, and by tp where its parts have
channels.

A part takes what its products and its other kernels take; or, if that is longer, what the host needs to start them.
`ep` may split embedding tables over the ranks of shard; then their results cross by all-to-all. Tables have gradients
of the rows that were read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.planner.collectives import message, uncovered
from unisono.planner.gathering import Sent, deals, moved
from unisono.planner.machines.chip import PassSeconds, Traffic, joined, timer
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import stride
from unisono.planner.memory import BUCKET, Memory, RowShare
from unisono.planner.price_parts import Passes, Rows
from unisono.planner.stack import Stack
from unisono.planner.states import item_of, moments_of, states, stored
from unisono.planner.timetables import copies, in_flight
from unisono.planner.work.networks import (
    Network,
    cut,
    kept_by,
    matrix_elements,
    part_pass,
    read_elements,
)
from unisono.planner.work.stage import ITEM
from unisono.spec.errors import Problem
from unisono.spec.workload import WorkPart


@dataclass(frozen=True, slots=True)
class PartSeconds:
    """Seconds of one part and one micro-batch. ahead: forward pass. back: backward pass, with `again`, its
    recomputation. gathered, scattered: its weights and its gradients, once."""

    ahead: PassSeconds
    back: PassSeconds
    again: PassSeconds
    gathered: Sent
    scattered: Sent

    def waits(self, hidden: float) -> tuple[float, float]:
        """Return exposed seconds of weights and gradients, forward and backward, where `hidden` of them may be
        hidden."""
        talk = self.gathered[1]
        return (
            uncovered(talk, self.ahead.total, hidden),
            uncovered(talk + self.scattered[1], self.back.total, hidden),
        )


def part_of(part: WorkPart, plan: Plan, cluster: Cluster, stack: Stack, samples: int) -> PartSeconds:
    on = timer(plan, cluster, stack)
    ahead, back = (on.of(part_pass(part, plan, samples, backward=way)) for way in (False, True))
    # All of a part between stem and head is computed again, or nothing.
    again = PassSeconds()
    if plan.recompute == "full" and not part.tables:
        again = on.of(part_pass(part, plan, samples, backward=False, again=True))
    weights = (
        matrix_elements(part) if plan.ep > 1 else float(part.parameters)
    )  # dealt tables stay where they are
    gathered, scattered = ((0.0, 0.0), (0.0, 0.0))
    if deals(plan) and weights:
        gathered, scattered = moved([(weights, plan.shard)], plan, cluster, stack)
    return PartSeconds(ahead, back + again, again, gathered, scattered)


def passes(network: Network, plan: Plan, cluster: Cluster, stack: Stack, samples: int, micros: int) -> Passes:
    """What the passes of a step take."""
    cuts, known = cut(network, plan.pp, plan.tp), dict[WorkPart, PartSeconds]()

    def seconds(part: WorkPart) -> PartSeconds:
        """Time a part. Parts that differ in their names alone are timed once."""
        alike = replace(part, name="")
        if alike not in known:
            known[alike] = part_of(part, plan, cluster, stack, samples)
        return known[alike]

    rows = [[seconds(part) for part in parts] for parts in cuts]
    # A model that is one part is gathered before anything of it computes.
    hidden = stack.dp_hidden if network.workload.blocks else 0.0
    waits = [[sum(timed.waits(hidden)[way] for timed in row) for way in (0, 1)] for row in rows]
    every, share = [timed for row in rows for timed in row], micros / plan.pp
    outputs = [parts[-1].output * samples * item_of(plan, stack) for parts in cuts[:-1]] or [0]
    most = max(outputs)
    send = message(cluster, stride(plan, "pp", cluster.order), most, stack.p2p, plan.pp) if most else 0.0
    again = sum(timed.again.device for timed in every)
    device = sum(timed.ahead.device + timed.back.device for timed in every)
    return Passes(
        rows=Rows(
            tuple(
                sum(timed.ahead.total for timed in row) + wait[0]
                for row, wait in zip(rows, waits, strict=True)
            ),
            tuple(
                sum(timed.back.total for timed in row) + wait[1]
                for row, wait in zip(rows, waits, strict=True)
            ),
            send=send,
        ),
        handed=sum(outputs) / len(outputs),
        first=shared(cuts, plan, samples * micros * plan.replicas),
        every=shared(cuts, plan, samples * plan.replicas),
        owned=max(
            sum(matrix_elements(part) for part in parts) / plan.shard
            + read_elements(parts, plan, samples * micros) / max(1, plan.shard // plan.ep)
            for parts in cuts
        ),
        inside=inside(
            every,
            plan,
            share,
            share * sum(map(sum, waits)),
        ),
        arithmetic=share
        * sum(timed.ahead.arithmetic + timed.back.arithmetic - timed.again.arithmetic for timed in every),
        device=share * device,
        again=share * again,
    )


def shared(cuts: list[tuple[WorkPart, ...]], plan: Plan, samples: float) -> RowShare:
    """Return the parameters whose gradients meet, of the row that sends most: its weights, and the rows of its tables
    that any rank of the group has read."""
    left, times = max(1, plan.shard // plan.ep), copies(plan.schedule, plan.pp)
    each = [(sum(map(matrix_elements, parts)), read_elements(parts, plan, samples)) for parts in cuts]
    dense, read = max(each, key=lambda row: row[0] / plan.shard + row[1] / left)
    return RowShare(dense * times, 0.0, 1.0, 1.0, float(plan.pp == 1), times, read * times, ranks=left)


def inside(each: list[PartSeconds], plan: Plan, share: float, waited: float) -> dict[str, Traffic]:
    """Return traffic by axis of `share` passes over the parts: results of split tables, weights and gradients."""
    traffic_by_axis: dict[str, Traffic] = {}
    for part in each:
        traffic_by_axis = joined(traffic_by_axis, joined(part.ahead.talk, part.back.talk))
    traffic_by_axis = {axis: traffic * share for axis, traffic in traffic_by_axis.items()}
    if deals(plan):
        nbytes, seconds = (sum(2 * part.gathered[i] + part.scattered[i] for part in each) for i in (0, 1))
        traffic_by_axis["shard"] = Traffic(share * nbytes, share * seconds, waited)
    return traffic_by_axis


def memories(
    network: Network, plan: Plan, stack: Stack, micro_batch: int, micros: int
) -> Iterator[tuple[int, Memory]]:
    """(row, memory of its ranks) of the pipeline."""
    first, blocks = 0, layers(network, plan, True)
    for row, parts in enumerate(cut(network, plan.pp, plan.tp)):
        sizes = {"micro_batch": micro_batch, "micros": micros, "row": row}
        yield row, _of_row(network, parts, plan, stack, (int(blocks[row]), first), **sizes)
        first += int(blocks[row])


def layers(network: Network, plan: Plan, is_balanced: bool) -> tuple[float, ...]:
    """Parts of each row of the pipeline, stem and head not counted."""
    ends = {0: 1, plan.pp - 1: 1} if plan.pp > 1 else {0: 2}
    return tuple(float(len(parts) - ends.get(i, 0)) for i, parts in enumerate(cut(network, plan.pp, plan.tp)))


def _of_row(
    network: Network, parts: tuple[WorkPart, ...], plan: Plan, stack: Stack, blocks: tuple[int, int], *,
    micro_batch: int, micros: int, row: int,
) -> Memory:  # fmt: skip
    """blocks: how many the row has, and which is its first."""
    item, weight = ITEM[plan.precision], item_of(plan, stack)
    times = copies(plan.schedule, plan.pp)
    dense = sum(map(matrix_elements, parts))
    tables = sum(part.tables.elements / plan.ep for part in parts if part.tables)
    read = read_elements(parts, plan, micro_batch * micros)
    left = max(1, plan.shard // plan.ep)

    moments = moments_of(network, plan, dense + tables, *blocks)

    def of(elements: float, shard: int) -> tuple[float, float, float]:
        return states(elements, shard=shard, zero=plan.zero, precision=stored(plan, stack), grad_bytes=stack.grad_bytes,
                      moments=moments, masters=not plan.arithmetic.stochastic)  # fmt: skip

    (params, grads, optim), looked_up = of(dense, plan.shard), of(tables, left)
    params, optim = times * (params + looked_up[0]), optim + looked_up[2]
    grads = times * (grads + of(read, left)[1])
    full = plan.recompute == "full"
    live = max(part.activations for part in parts) if full else 0
    flying = in_flight(plan.schedule, row, plan.pp, micros)
    activations = micro_batch * item * (sum(kept_by(part, plan) for part in parts) * flying + live)
    gathered = 0.0
    if deals(plan):
        gathered = (
            weight * 3 * max(matrix_elements(part) if plan.ep > 1 else part.parameters for part in parts)
        )
    elif plan.replicas > 1:
        gathered = min(BUCKET, weight * (dense + read))
    memory = Memory(params, grads, optim, activations, gathered)
    return replace(memory, slack=stack.slack * memory.allocated)


def problems(network: Network, plan: Plan) -> list[Problem]:
    """Return what keeps a plan from being priced: axes that cannot split these parts."""
    units = [part.channels.units for part in network.workload.parts if part.channels]
    reasons = _of_channels(plan, min(units, default=0))
    if plan.cp > 1:
        what = f"cp={plan.cp}: this kind of model has no positions"
        reasons.append(Problem("P12", what, "plan.cp, model.kind", "leave cp out"))
    if plan.ep > 1 and network.holders(plan.ep) == 1:
        reasons.append(Problem("P12", f"ep={plan.ep}: the model has no tables", "plan.ep", "leave ep out"))
    if plan.pp > network.n_layer:
        what = f"pp={plan.pp} stages need at least {plan.pp} parts, the model has {network.n_layer} between its ends"
        reasons.append(Problem("P13", what, "plan.pp", f"pp={network.n_layer} or less"))
    return reasons


def _of_channels(plan: Plan, units: int) -> list[Problem]:
    """Return what keeps `tp` from being priced. units: of the part that has fewest channels to split."""
    if plan.tp == 1:
        return []
    if not units:
        what = f"tp={plan.tp}: of this kind of model, dp, shard and pp can be priced"
        return [Problem("P12", what, "plan.tp, model.kind", "leave tp out")]
    if isinstance(plan.tp, Grid):
        what = f"tp={plan.tp}: a convnet or an MLP has no products in rows and columns"
        return [Problem("P12", what, "plan.tp", f"tp={int(plan.tp)}, whose products are split in one row")]
    if plan.tp > units:
        what = f"tp={plan.tp}: a part has {units} to split, and some ranks would have none"
        return [Problem("P12", what, "plan.tp", f"tp={units} or less")]
    return []
