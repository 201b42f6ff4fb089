"""Bytes of tensors that are alive on a rank of ours at its peak, as `measure.live` counts them: the ledger by which
`recompute=auto` and `train.micro_batch = "auto"` choose, and which a run that is out of memory is shown.

Beside `host_memory`, which says what a process has resident, this counts tensors alone, and knows what is put away and
what is computed again block by block. The fullest moment is one of four: a backward begins, its first block or its last
one is under way, or the optimiser steps.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from unisono.plan import Plan
from unisono.plan.away import again_of, away_of
from unisono.planner.memory import Memory, RowShare, share_of, states
from unisono.planner.source import Source
from unisono.planner.timetables import in_flight, of
from unisono.planner.work import kept
from unisono.planner.work.passes import ITEM, block_elements
from unisono.planner.work.transformer import Transformer

_AT_ONCE = Source(
    "specification", "parallel.offload.streaming.AT_ONCE: bytes of optimiser state that are there at once"
)
STREAMED: Annotated[float, _AT_ONCE] = float(25 << 20)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Bytes that one micro-batch keeps in the blocks of a stage. kept: of all. first: of the first. again_*: what
    is there more while that block is computed again. working: what its backward makes on the way. ahead: what one block
    has on its way forward, where all goes home behind it."""

    kept: float
    first: float
    again_first: float
    again_last: float
    working: float
    ahead: float = 0.0


def alive(model: Transformer, plan: Plan, *, micro_batch: int, micros: int, row: int) -> Memory:
    """Bytes of one rank of a pipeline row at its peak; slack is 0."""
    share, away = share_of(model, plan, row, True), away_of(plan)
    own = ITEM * (share.blocks + share.ends)
    params, _, optim = states(
        share.blocks + share.ends, shard=plan.shard * plan.cp, zero=plan.zero, precision="fp32", grad_bytes=4,
        moments=model.states,
    )  # fmt: skip
    unit = ITEM * block_elements(model, plan.tp)
    widest = ITEM * model.d_model * max(model.d_ff, model.vocab) / plan.tp
    beside = _gathered(plan, share, own, unit)
    if away.params:
        params, beside = 0.0, max(unit, 2 * widest)
    streamed = min(STREAMED, optim)
    if away.optimizer:
        optim = 0.0
    moments = [
        Memory(params, grads, optim, activations, beside)
        for grads, activations in _moments(model, plan, share, own, unit, widest, micro_batch, micros, row)
    ]
    if away.optimizer:
        brought = (
            min(own, streamed / max(1, model.states)) if away.params else params
        )  # with the state of the same weights
        moments.append(Memory(brought, own / plan.shard, streamed, 0.0, 0.0 if away.params else beside))
    return max(moments, key=lambda memory: memory.total)


def fullest(model: Transformer, plan: Plan, *, micro_batch: int, micros: int) -> tuple[int, Memory]:
    """(row, its memory) of the rank that needs most."""
    rows = [alive(model, plan, micro_batch=micro_batch, micros=micros, row=row) for row in range(plan.pp)]
    row = max(range(plan.pp), key=lambda r: rows[r].total)
    return row, rows[row]


def _gathered(plan: Plan, share: RowShare, own: float, unit: float) -> float:
    """Bytes of weights beside a rank's own part: below zero=3 the whole, else two blocks, as they arrive and as they
    are read, and the ends."""
    if plan.shard == 1:
        return 0.0
    return own / plan.shard if plan.zero < 3 else 4.0 * unit + ITEM * share.ends


def _moments(
    model: Transformer, plan: Plan, share: RowShare, own: float, unit: float, widest: float, micro_batch: int,
    micros: int, row: int,
) -> list[tuple[float, float]]:  # fmt: skip
    """(bytes of gradients, of activations)."""
    e = 2 if plan.precision in ("bf16", "fp16") else int(ITEM)
    sizes = micro_batch, plan.tp, plan.cp, e
    held = in_flight(plan.schedule, row, plan.pp, micros)
    blocks = _blocks(model, plan, share, micro_batch, e)
    whole = held * blocks.kept + share.stem * held * kept.stem_bytes(model, *sizes)
    heads = 1.0 + float(of(plan.schedule).heaped) * (held - 1.0)
    head = share.head * kept.head_bytes(model, *sizes) * heads
    loss = share.head * kept.loss_bytes(model, *sizes)
    flat = own / plan.shard if plan.dp > 1 else 0.0
    added = own / (plan.shard if plan.zero > 1 else 1) if plan.dp == 1 else 0.0
    ends, late = ITEM * share.ends, 0.0 if plan.dp > 1 else 1.0
    # What a stage hands on stays until the next one has it, and what came for it until it is used.
    carry = ITEM * micro_batch * model.context * model.d_model / plan.tp / plan.cp
    sent = carry * ((0 if share.head else micros + held + 1) if plan.pp > 1 else 0)
    whole += sent
    begun = whole + head + loss
    top = whole + head * (heads - 1.0) / heads + blocks.again_last + blocks.working
    bottom = sent + (held - 1.0) * blocks.kept + blocks.first + blocks.again_first + blocks.working
    # Of the block under way, the gradients of what comes behind its activation are there.
    found = [
        (flat, begun),
        (flat + late * ends, top),
        (flat + late * (own - 0.5 * unit), bottom),
    ]
    if blocks.ahead:
        found.append((flat + (added if micros > 1 else 0.0), whole + blocks.ahead))
    if micros > 1:
        found.append((flat + added + late * widest, bottom))
    if micros > held:
        found += [(flat + added, begun), (flat + added + late * widest, top)]
    elif micros > 1:
        fewer = blocks.kept + share.stem * kept.stem_bytes(model, *sizes)
        found += [(flat + added, begun - fewer), (flat + added + late * widest, top - fewer)]
    return found


def _blocks(model: Transformer, plan: Plan, share: RowShare, micro_batch: int, e: int) -> _Blocks:
    def one(mode: str) -> float:
        return kept.block_bytes(
            model,
            micro_batch=micro_batch,
            tp=plan.tp,
            cp=plan.cp,
            cp_kind=plan.cp_kind,
            recompute=mode,
            itemsize=e,
            composed=True,
        )

    layers = share.layers
    modes = again_of(plan, int(layers))
    each = {mode: one(mode) for mode in ("none", "selective", "full")}
    rest = layers - modes.full - modes.selective
    kept_now = modes.full * each["full"] + modes.selective * each["selective"] + rest * each["none"]
    first = "full" if modes.full else "selective" if modes.selective else "none"
    last = "none" if rest > 0 else "selective" if modes.selective else "full"
    tokens = micro_batch * model.context / plan.cp
    working = tokens * ITEM * (model.d_ff + model.d_model) / plan.tp
    if away_of(plan).activations:
        # Backward has of a block what its widest node reads: no more is fetched.
        read = tokens * ITEM * 2 * model.d_ff / plan.tp
        return _Blocks(0.0, 0.0, read, read, working, each["none"] + tokens * ITEM * model.d_model / plan.tp)
    return _Blocks(kept_now, each[first], each["none"] - each[first], each["none"] - each[last], working)


def chosen(model: Transformer, plan: Plan, capacity: float, *, micro_batch: int, micros: int) -> Plan | None:
    """The plan with the fewest blocks computed again that fits, `recompute=auto:full=F,selective=S`: first attention in
    more and more blocks of each stage, then whole blocks in the place of these. None where nothing fits."""
    depth = -(-model.n_layer // plan.pp)
    ways = [(0, s) for s in range(depth + 1)] + [(f, depth - f) for f in range(1, depth + 1)]
    for full, selective in ways:
        tried = replace(plan, recompute=f"auto:full={full},selective={selective}")
        if fullest(model, tried, micro_batch=micro_batch, micros=micros)[1].total <= capacity:
            return tried
    return None
