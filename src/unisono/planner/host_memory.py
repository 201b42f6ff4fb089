"""Memory of ranks that share a host's cores, at the moment of its peak, in bytes that are resident."""

from dataclasses import replace

from unisono.plan import Plan
from unisono.planner.alike import as_dealt
from unisono.planner.kinds import Model, kind
from unisono.planner.machines.host import Host
from unisono.planner.machines.order import dealers
from unisono.planner.memory import Memory, at_peak
from unisono.planner.states import states_of_ours
from unisono.planner.timetables import in_flight
from unisono.planner.work.inside import in_one_piece
from unisono.planner.work.passes import ITEM
from unisono.planner.work.stage import RowWork


def memory_on_host(
    model: Model, plan: Plan, host: Host, *, micro_batch: int, micros: int
) -> tuple[int, Memory]:
    """(row, its memory): of the fullest rank, in bytes that are resident. slack: what the process has beside."""
    works = kind(model).row_works(model, plan, micro_batch, micros)
    rows = [_memory_of(model, plan, host, micros, row, own) for row, own in enumerate(works)]
    row = max(range(plan.pp), key=lambda r: rows[r].total)
    return row, rows[row]


def _memory_of(model: Model, plan: Plan, host: Host, micros: int, row: int, own: RowWork) -> Memory:
    params, optim, gathered = _weights(model, plan, own)
    held = in_flight(plan.schedule, row, plan.pp, micros)
    grads, activations, moving = max(_moments(plan, micros, held, own), key=sum)
    needed = Memory(params, grads, optim, activations, gathered + moving)
    beside = host.beside(activations + gathered + moving, moved(plan, own))
    return replace(needed, slack=beside)


def moved(plan: Plan, own: RowWork) -> dict[str, float]:
    """The axes of a plan, and the bytes of what each gathers at once: a block's weights, a block's activations."""
    sizes = {"shard": own.unit, "tp": own.piece}
    return {axis: sizes.get(axis, 0.0) for axis in ("dp", "shard", "tp", "pp") if getattr(plan, axis) > 1}


def _weights(model: Model, plan: Plan, own: RowWork) -> tuple[float, float, float]:
    """Bytes of weights, of the optimiser and of what is gathered, at any moment of a pass."""
    params = optim = beside = 0.0
    for zero, elements in own.by_zero(plan.zero):
        some, _, state = states_of_ours(elements, as_dealt(plan, zero), dealers(plan), model.states)
        params, optim = params + some, optim + state
        if plan.shard > 1 and zero < 3:  # the part that the optimiser steps is there beside the whole
            beside += ITEM * elements / dealers(plan)
    if plan.shard == 1:
        return params, optim, 0.0
    deepest = max(zero for zero, elements in own.by_zero(plan.zero) if elements)
    gathered = 2 * own.unit * (deepest == 3) + own.rim * (plan.zero == 3)
    return params + beside, optim, gathered


def _moments(plan: Plan, micros: int, held: float, row: RowWork) -> list[tuple[float, float, float]]:
    """(bytes of gradients, of activations, of gradients on their way) at moments of which one is the fullest: a
    backward begins, in the first micro-batch and in later ones, or the last one ends."""
    own = ITEM * row.elements
    # The reducer's buffer is there from the first step on, with what a rank sees of the others' when it adds up its
    # part; it takes gradients a few at a time.
    flat = (2.0 - 1.0 / plan.dp) * own / dealers(plan) if plan.dp > 1 else 0.0
    zeros = [zero for zero, elements in row.by_zero(plan.zero) if elements]
    unit = own if in_one_piece(plan, own, zeros) else row.unit
    moving = 2 * unit if plan.shard > 1 else row.widest if plan.dp > 1 else 0.0
    added = sum(
        ITEM * elements / (dealers(plan) if zero > 1 else 1) for zero, elements in row.by_zero(plan.zero)
    )
    kept = flat + (added if plan.shard > 1 or plan.dp == 1 else 0.0)
    last = flat + (own / dealers(plan) if plan.shard > 1 or plan.dp == 1 else 0.0)
    full = at_peak(held, row.kept, row.owed, row.working)
    found = [(flat, full, 0.0), (last, row.working, moving)]
    if micros > 1:
        found.append((kept, full - row.kept - row.owed, moving))
    if micros > held:
        found.append((kept, full, moving))
    return found
