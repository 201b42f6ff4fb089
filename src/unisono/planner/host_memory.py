"""Memory of ranks that share a host's cores, at the moment of its peak, in bytes that are resident."""

from dataclasses import replace
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.cuts import rows_of
from unisono.planner.machines.cluster import Source
from unisono.planner.machines.host import Host
from unisono.planner.memory import Memory, share_of, states
from unisono.planner.timetables import ends, in_flight, of
from unisono.planner.work.kept import block_bytes, head_bytes, owed_bytes
from unisono.planner.work.transformer import Transformer

ITEM: Annotated[float, Source("specification", "bytes of fp32, in which ranks on CPUs compute")] = 4.0


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
    own, rim = own_of(model, plan, row), share_of(model, plan, row, True).ends
    params, _, optim = states(
        own, shard=plan.shard, zero=plan.zero, precision="fp32", grad_bytes=4, moments=model.states
    )
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
    layered = kept_by_block(model, plan, micro_batch, plan.recompute)
    layers, held = layers_of(model, plan)[row], in_flight(plan.schedule, row, plan.pp, micros)
    working = kept_by_block(model, plan, micro_batch) if plan.recompute == "full" else 0.0
    head = 0.0
    if row in ends(plan.schedule, plan.pp)[1]:
        # Of one micro-batch the logits, their log-probabilities and the gradient of these.
        working += 3.0 * ITEM * micro_batch * model.context * model.vocab / plan.tp
        # Where all forward passes come first, every other micro-batch keeps what its loss is made from.
        schedule = of(plan.schedule)
        if schedule.heaped:
            head = head_bytes(model, micro_batch, plan.tp)
        elif schedule.late:
            head = owed_bytes(model, micro_batch, plan.tp)
    own = ITEM * own_of(model, plan, row)
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
    full = held * layers * layered + (held - 1) * head + working
    found = [(flat, full, 0.0), (last, working, moving)]
    if micros > 1:
        found.append((kept, full - layers * layered - head, moving))
    if micros > held:
        found.append((kept, full, moving))
    return found


def block_of(model: Transformer, tp: int) -> float:
    """Bytes of one block's weights on one rank of tp, before `shard` deals them."""
    dealt, whole = model.block_parameters
    return ITEM * (dealt / tp + whole)


def kept_by_block(model: Transformer, plan: Plan, micro_batch: int, recompute: str = "none") -> float:
    """Bytes that one block of one micro-batch keeps from its forward to its backward pass."""
    sizes = {"micro_batch": micro_batch, "tp": plan.tp, "itemsize": int(ITEM)}
    return block_bytes(model, **sizes, recompute=recompute, composed=True)


def layers_of(model: Transformer, plan: Plan) -> tuple[float, ...]:
    """Blocks of each row, as the program cuts: where the dearest row is cheapest."""
    return rows_of(model, plan.schedule, plan.pp, True)


def own_of(model: Transformer, plan: Plan, row: int) -> float:
    """Parameters of one rank of a row, before `shard` deals them."""
    share = share_of(model, plan, row, True)
    return share.blocks + share.ends
