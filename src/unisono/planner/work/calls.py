"""What one rank of ours sends in a step: every collective and message, a list that depends on model and plan alone.

tests/planner/test_calls.py holds it to what ranks record, call by call and byte by byte.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner.machines.order import dealers, virtual_of
from unisono.planner.memory import BUCKET
from unisono.planner.source import Source
from unisono.planner.timetables import copies, ends, of
from unisono.planner.work import networks, passes, tables
from unisono.planner.work.coded import declared
from unisono.planner.work.dealt import TOLD, expert_rows, without_experts
from unisono.planner.work.inside import StageElements, item, leafwise, of_pass, summed
from unisono.planner.work.networks import Network
from unisono.planner.work.stage import Transfer
from unisono.planner.work.transformer import Transformer
from unisono.planner.work.wires import carried
from unisono.programs.pipeline import SENDS, lower
from unisono.spec.work import Call

_REDUCER = Source("specification", "our own reducer, train.departures: the first bucket leaves early")
FIRST_BUCKET: Annotated[float, _REDUCER] = float(1 << 20)
_SUMMED = Source("specification", "train.step: losses and squared norms are summed in fp64")
WIDE: Annotated[float, _SUMMED] = 8.0


def stages(model: Transformer | Network, plan: Plan) -> list[StageElements]:
    """Of the stages that one micro-batch passes, as the program cuts."""
    return networks.held(model, plan) if isinstance(model, Network) else passes.held(model, plan)


def calls(
    model: Transformer | Network, plan: Plan, micro_batch: int, micros: int, row: int = 0, near: bool = True
) -> tuple[Transfer, ...]:
    """Of a rank of pipeline row `row`. near: replicas are on one host, and may add up gradients in its memory."""
    every, own_passes = stages(model, plan), _passes(plan.schedule, plan.pp, micros)[row]
    found: list[Transfer] = []
    for stage, count in own_passes:
        own = every[stage % len(every)]
        for backward in (False, True):
            made = of_pass(model, plan, own, micro_batch, count, backward=backward)
            found += [Transfer(c.axis, c.op, c.nbytes, c.times * count) for c in made]
    here = [every[stage % len(every)] for stage, _ in own_passes]
    alone = sum(own.alone for own in here)
    elements = sum(own.inside + own.rim for own in here)
    if (
        (len(here) > 1 or plan.arithmetic.narrow)
        and any(own.stem for own in here)
        and any(own.head for own in here)
        and not leafwise(plan)
    ):
        elements -= model.tied_elements / plan.tp  # one gradient travels for both uses
    near = near and _near(plan)
    layers = sum(own.blocks for own in here)
    elements, routed = without_experts(model, plan, layers, elements, item(plan))
    for axis, some in summed(plan, elements, alone):
        for nbytes in buckets(item(plan) * some / dealers(plan), near):
            found.append(Transfer(axis, "all_reduce", nbytes))
    for call in (call for call, _ in routed if call.ranks(plan) > 1):
        found += [call._replace(nbytes=nbytes) for nbytes in buckets(call.nbytes, near)]
    meeting = [(elements - alone) / dealers(plan), alone / dealers(plan), *(some for _, some in routed)]
    if not _all_wait(plan):  # those of experts that wait for no sum travel with the others that do not
        meeting[0] += sum(some for call, some in routed if call.ranks(plan) == 1)
        meeting[2:] = [some for call, some in routed if call.ranks(plan) > 1]
    for kind, stage, count in _sends(plan.schedule, plan.pp, micros)[row]:
        own = every[stage % len(every)]
        handed = own.ahead if kind == "SEND_F" else own.back
        found.append(
            Transfer("pp", "send", carried(plan, item(plan)) * micro_batch * handed, count, later=True)
        )
    found += _together(model, plan, meeting, near)
    for own in here:
        for read in own.tables:
            found += tables.together(read, plan, micro_batch * micros, item(plan))
    found += _told(model, plan, here, sum(meeting), micros)
    return tuple(call for call in found if call.nbytes * call.times > 0)


@cache
def _passes(schedule: str, ranks: int, micros: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of each row, its stages, and how many micro-batches pass each."""
    made = of(schedule).timetable(ranks, micros)
    return tuple(
        tuple((stage, len(made.micros_of(stage))) for stage in made.owned(row)) for row in range(ranks)
    )


@cache
def _sends(schedule: str, ranks: int, micros: int) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """Of each row, messages that leave: their kind, their stage, how many."""
    rows = lower(of(schedule).timetable(ranks, micros)).rows
    counts = [Counter((action.kind, action.stage) for action in row if action.kind in SENDS) for row in rows]
    return tuple(tuple((*key, count) for key, count in each.items()) for each in counts)


def _near(plan: Plan) -> bool:
    """Whether gradients of replicas on one host meet in its memory."""
    return (
        plan.dp > 1 and not leafwise(plan) and getattr(member("collective", plan.collective), "nearby", False)
    )


def _all_wait(plan: Plan) -> bool:
    """Whether every gradient of a layer that is whole waits for a sum inside the replica."""
    return plan.cp > 1 and plan.shard == 1


def _together(
    model: Transformer | Network, plan: Plan, meeting: Sequence[float], near: bool
) -> Iterator[Transfer]:
    """Gradients of replicas, as policy and codec have them meet, bucket by bucket. meeting: elements of those that wait
    for the same sum before."""
    if plan.dp == 1 or member("sync", plan.sync) is None or member("codec", plan.codec) is None:
        return
    size = item(plan)
    for some in meeting:
        for nbytes in buckets(size * some, near):
            for call in declared(model, plan, size, nbytes / size).calls:
                yield of_call(call, plan.dp)


def of_call(call: Call, ranks: int) -> Transfer:
    """What a member declares as bytes that one rank sends."""
    one = Transfer(call.axis, call.op, 1.0).sent(ranks)
    return Transfer(call.axis, call.op, call.nbytes / one, call.times, later=True)


def buckets(nbytes: float, near: bool) -> list[float]:
    """Bytes of each in which so many travel: all at once where they meet in memory."""
    if near or not nbytes:
        return [nbytes] if nbytes else []
    sizes, left = [min(FIRST_BUCKET, nbytes)], nbytes - min(FIRST_BUCKET, nbytes)
    while left > 0:
        sizes.append(min(BUCKET, left))
        left -= sizes[-1]
    return sizes


def _told(
    model: Transformer | Network, plan: Plan, here: list[StageElements], elements: float, micros: int
) -> Iterator[Transfer]:
    """What two rows have of each other's gradients, and the numbers of a step: losses and wishes of all replicas, the
    norm."""
    stems, heads = ends(plan.schedule, plan.pp)
    if copies(plan.schedule, plan.pp) > 1:
        # And one number: whether a half lacks some of them.
        yield Transfer("pp", "all_reduce", item(plan) * (elements + 1))
    elif stems != heads and any(own.stem or own.head for own in here):
        yield Transfer("pp", "all_reduce", item(plan) * model.tied_elements / plan.tp / dealers(plan))
    apart = leafwise(plan)
    places = 2 + (micros * plan.replicas if apart else 1)
    if plan.dp > 1:
        yield Transfer("dp", "all_gather", WIDE * places * plan.dp, later=True)
    if plan.inner > 1:
        yield Transfer("replica", "all_reduce", WIDE * (_squares(model, apart) * virtual_of(plan) + places))
    if isinstance(model, Transformer) and model.experts and not model.apart and plan.world > 1:
        routers = model.experts.layers(0, model.n_layer)
        yield Transfer("world", "all_reduce", WIDE * routers * (model.experts.count + TOLD))


def _squares(model: Transformer | Network, rows: bool) -> int:
    """Squared norms that a replica adds up: one for each tensor of the model, or for each row of each, which virtual
    shards cut into as many."""
    if isinstance(model, Network):
        if not rows:
            return sum(part.tensors for part in model.workload.parts)
        # A vector has as many rows as elements, a matrix or a filter as many as its product has columns.
        products = [p for part in model.workload.parts for p in part.products if not p.batched]
        vectors = model.workload.parameters - sum(p.inner * p.columns for p in products)
        return vectors + sum(p.columns for p in products)
    norm = 1 if model.rms or not model.bias else 2
    if not rows:
        return model.block_tensors * model.n_layer + 1 + model.learned + norm + (not model.tied)
    ups, wide = (2 if model.gated else 1) * model.d_ff, model.d_model
    dense = 1.0 - model.sparse_share
    block = (model.qkv_width + wide + dense * (ups + wide)) * (2 if model.bias else 1) + 2 * norm * wide
    block += model.sparse_share * expert_rows(model)
    stem = model.vocab + (model.stem_parameters[1] // wide)
    return round(block * model.n_layer) + stem + norm * wide + (0 if model.tied else model.vocab)


def _as_messages(call: Transfer, ranks: int) -> Transfer:
    return call._replace(op="send", nbytes=call.nbytes / ranks, times=call.times * (ranks - 1))


def sent(
    model: Transformer | Network, plan: Plan, micro_batch: int, micros: int, row: int = 0, near: bool = True
) -> dict[tuple[str, str], tuple[float, float]]:
    """(axis, operation) → (bytes that a rank on a CPU sends in a step, how often), as the collectives count them."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for call in calls(model, plan, micro_batch, micros, row, near):
        way: Any = member("collective", plan.collective if call.axis == "dp" else Plan().collective)
        if call.op == "ring":  # a message to the next rank, and so often that all have had it
            call = _as_messages(call, call.ranks(plan))
        n, op = call.ranks(plan), "all_to_all" if call.op == "reduce_scatter" else call.op
        if op == "send":
            nbytes = call.nbytes
        else:
            size = call.nbytes / n if op == "all_gather" else call.nbytes
            nbytes = way.way(op, size, n, call.later).sent(op, round(size), n)
        had = found.get((call.told, call.op), (0.0, 0.0))
        found[call.told, call.op] = (had[0] + nbytes * call.times, had[1] + call.times)
    return found
