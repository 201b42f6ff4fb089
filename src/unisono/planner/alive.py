"""Bytes of tensors that are alive on a rank at its peak, as `benchmarks/live.py` counts them.

`recompute=auto` and the largest micro-batch are chosen by this ledger, and a run that is out of memory shows it. It
counts tensors alone, and knows what is offloaded and which blocks are recomputed. The peak is one of four moments: a
backward pass begins, its first block runs, its last block runs, or the optimiser steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from unisono.plan import Plan
from unisono.plan.blocks import away_of
from unisono.planner.cuts import rows_of
from unisono.planner.grouping import as_dealt, in_order, stages_in
from unisono.planner.machines.order import owners, virtual_of
from unisono.planner.memory import BUCKET, Memory, RowShare, share_of
from unisono.planner.recompute import fewest
from unisono.planner.source import Source
from unisono.planner.states import moments_of, states_of_ours
from unisono.planner.timetables import in_flight, of
from unisono.planner.unbuffered import unbuffered
from unisono.planner.work import activations
from unisono.planner.work.expert_parallel import held_experts
from unisono.planner.work.layouts import virtual_kept
from unisono.planner.work.passes import dealt_elements, each_block, handed_elements
from unisono.planner.work.replica_traffic import leafwise
from unisono.planner.work.stage import Transfer
from unisono.planner.work.transformer import Transformer

_AT_ONCE = Source(
    "specification", "parallel.offload.streaming.AT_ONCE: bytes of optimiser state that are there at once"
)
STREAMED: Annotated[float, _AT_ONCE] = float(25 << 20)
_ITEM = 4.0  # bytes of fp32, in which weights and gradients of ours are kept


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Bytes that one micro-batch keeps in the blocks of a stage.

    kept: of all blocks. first, last: of the first and of the last one. again_first, again_last: extra bytes while
    that block is recomputed. working: gradients on their way in its backward pass. ahead: of one block in its forward
    pass, where everything is offloaded behind it. attending: extra bytes while the last block's attention is
    differentiated. weight_grads, weight_grads_before: its weight gradients at the beginning of its backward pass, and
    at its attention. between: at each change of kind, (weights behind, bytes of activations).
    """

    kept: float
    first: float
    again_first: float
    again_last: float
    working: float
    ahead: float = 0.0
    last: float = 0.0
    attending: float = 0.0
    weight_grads: float = 0.0
    weight_grads_before: float = 0.0
    between: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a step on a row. unit, widest: bytes of what `shard` gathers at once, and of the largest gradient.
    apart: as of `alive`."""

    unit: float
    widest: float
    micro_batch: int
    micros: int
    row: int
    apart: bool


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of weights of one rank, as long as a step lasts.

    whole: before `shard` shards them. apart: of these, experts that `shard` leaves whole. among: ranks that shard the
    rest. late: of the rest, what zero=1 and 2 gather once a step. first: what zero=1 shards, whose gradients stay
    whole. deep: whether zero=3 shards some blocks.
    """

    whole: float
    apart: float
    among: int
    late: float
    first: float
    deep: bool

    @property
    def dealt(self) -> float:
        """Bytes that a rank keeps and updates."""
        return (self.whole - self.apart) / self.among + self.apart

    @property
    def added(self) -> float:
        """Bytes of gradients that a rank keeps from one micro-batch to the next."""
        return self.dealt + self.first * (1.0 - 1.0 / self.among)


@dataclass(frozen=True, slots=True)
class _Lying:
    """Bytes of weights and optimiser states between steps, on the rank and offloaded (away_*)."""

    params: float
    optim: float
    away_params: float
    away_optim: float


def _parts(model: Transformer, plan: Plan, share: RowShare, row: int) -> list[tuple[Plan, float]]:
    """Return pairs (plan, bytes of weights before sharding): of the ends, then of each block."""
    held = share.blocks + (0.0 if held_experts(model, plan).apart else share.routed)
    return [(plan, _ITEM * share.ends), *each_block(model, plan, _ITEM * held, row)]


def _lying(
    plan: Plan, parts: Sequence[tuple[Plan, float]], held: _Held, moments: float, averages: int
) -> _Lying:
    """moments: numbers of the optimiser for each weight. averages: of the weights, which lie where these lie."""
    sums = [0.0, 0.0, 0.0, 0.0]
    for way, nbytes, among in (*((way, size, held.among) for way, size in parts), (plan, held.apart, 1)):
        away = away_of(way)
        params, _, optim = states_of_ours(nbytes / _ITEM, as_dealt(plan, way.zero), among, moments)
        sums[2 if away.params else 0] += params
        sums[3 if away.optimizer else 1] += optim
        sums[3 if away.params else 1] += averages * nbytes / among
    return _Lying(*sums)


def _held(model: Transformer, plan: Plan, share: RowShare, parts: Sequence[tuple[Plan, float]]) -> _Held:
    experts, routed = held_experts(model, plan), _ITEM * share.routed
    return _Held(
        _ITEM * (share.blocks + share.ends) + routed,
        routed if experts.apart else 0.0,
        owners(plan)[0],
        sum(nbytes for way, nbytes in parts if way.zero < 3),
        sum(nbytes for way, nbytes in parts if way.zero == 1),
        any(way.zero == 3 for way, _ in parts[1:]),
    )


def alive(
    model: Transformer, plan: Plan, *, micro_batch: int, micros: int, row: int, apart: bool = False
) -> Memory:
    """Return the bytes of one rank of a pipeline row at its peak. Slack is 0. apart: on a device whose copies go on
    beside its work, so that backward has what it needs next fetched ahead."""
    share, ways = share_of(model, plan, row, True), in_order(model, plan, row)
    parts = _parts(model, plan, share, row)
    held = _held(model, plan, share, parts)
    moments_kept = moments_of(model, plan, share.elements, share.layers) - model.averages
    lying = _lying(plan, parts, held, moments_kept, model.averages)
    unit = _ITEM * max(dealt_elements(model, way) for way in set(ways))
    widest = _ITEM * model.d_model * max(model.d_ff, model.vocab) / plan.tp
    lent = unit if any(away_of(way).params for way in ways) else 0.0
    lent = max(lent, 2 * widest if away_of(plan).params else 0.0)
    sizes = _Sizes(unit, widest, micro_batch, micros, row, apart)
    moments = [
        Memory(lying.params, grads, lying.optim, activations, beside + lent)
        for beside, grads, activations in _moments(model, plan, share, held, sizes)
    ]
    if lying.away_optim:
        streamed = min(STREAMED, lying.away_optim)
        brought = min(
            lying.away_params, streamed / max(1, moments_kept)
        )  # with the state of the same weights
        beside = _gathered(plan, share, held, unit)
        moments.append(Memory(lying.params + brought, held.dealt, lying.optim + streamed, 0.0, beside))
    return max(moments, key=lambda memory: memory.total)


def fullest(
    model: Transformer, plan: Plan, *, micro_batch: int, micros: int, apart: bool = False
) -> tuple[int, Memory]:
    """Return (row, memory) of the rank that needs most. apart: as of `alive`."""
    batch = {"micro_batch": micro_batch, "micros": micros}
    rows = [alive(model, plan, **batch, row=row, apart=apart) for row in range(plan.pp)]
    row = max(range(plan.pp), key=lambda r: rows[r].total)
    return row, rows[row]


def _gathered(plan: Plan, share: RowShare, held: _Held, units: float) -> float:
    """Bytes of weights beside a rank's own part: below zero=3 the whole, else those of blocks as they arrive and as
    they are read, and the ends."""
    if plan.shard == 1:
        return 0.0
    ends = _ITEM * share.ends if plan.zero == 3 else 0.0
    return held.late / held.among + (units if held.deep else 0.0) + ends


def _moments(
    model: Transformer, plan: Plan, share: RowShare, held_weights: _Held, shape: _Sizes
) -> list[tuple[float, float, float]]:
    """(bytes beside the weights, of gradients, of activations)."""
    e, shards = 2 if plan.precision in ("bf16", "fp16") else int(_ITEM), virtual_of(plan)
    (micros, unit), sizes = (shape.micros, shape.unit), (shape.micro_batch, plan.tp, plan.cp, e)
    held = in_flight(plan.schedule, shape.row, plan.pp, micros)
    blocks = _blocks(model, plan, share, shape, e)
    ways = in_order(model, plan, shape.row)
    stem = share.stem * activations.stem_bytes(model, *sizes, shards=shards)
    whole = held * (blocks.kept + stem)
    heads = 1.0 + float(of(plan.schedule).heaped) * (held - 1.0)
    head = share.head * activations.head_bytes(model, *sizes, shards=shards) * heads
    loss = share.head * activations.loss_bytes(model, *sizes)
    # Sums have a buffer each. Those of replicas alone take gradients as they come; others, once all are there.
    waits = plan.dp == 1 or (plan.cp > 1 and plan.shard == 1) or plan.shard > 1
    flat, added = _summed(model, plan, share, held_weights), _added(plan, held_weights, micros, waits)
    ends, late, widest = _ITEM * share.ends, float(waits), shape.widest
    # What a stage hands on stays until the next one has it, and what came for it until it is used.
    carry = _ITEM * shape.micro_batch * handed_elements(model, plan)
    sent = carry * ((0 if share.head else micros + held + 1) if plan.pp > 1 else 0)
    whole += sent
    behind = whole + head * (heads - 1.0) / heads
    top = behind + blocks.again_last + blocks.working
    bottom = sent + (held - 1.0) * blocks.kept + blocks.first + blocks.again_first + blocks.working
    beside = _gathered(plan, share, held_weights, 0.0), _gathered(plan, share, held_weights, 2.0 * unit)
    came = unbuffered(waits, share, ends, held_weights.dealt, unit / held_weights.among, blocks.weight_grads)
    moments = [
        (beside[0], flat, whole + head + loss),
        (beside[1], flat + came[0], top),
        (beside[1], flat + late * ends + blocks.weight_grads_before, behind + blocks.attending),
        (beside[1], flat + came[1], bottom),
        (beside[1], flat + came[2], sent + (held - 1.0) * (blocks.kept + stem)),
    ]
    for weights, under in blocks.between:
        grads = max(late * (ends + weights / held_weights.among), (added + late * widest) * (micros > 1))
        moments.append((beside[1], flat + grads, sent + (held - 1.0) * blocks.kept + under))
    fewer = 0.0 if micros > held else blocks.kept + stem
    if in_one_piece(plan, held_weights.whole, (way.zero for way in ways)):
        everything = held_weights.whole - held_weights.apart
        # FSDP2 lets go of weights as they travelled when the next piece arrives, or backward begins.
        moments.append((beside[0], flat + everything, whole + head))
        # Gradients leave in one piece when the last backward ends: the piece, what comes of others, its sum.
        moments.append((beside[0], flat + 2.0 * everything + held_weights.dealt, sent))
    elif plan.shard > 1:
        places = behind, fewer, blocks.last, bottom - blocks.working, carry
        zeros = ways[0].zero, ways[-1].zero
        moments += _scattering(plan, zeros, share, held_weights, shape, (flat, added), places)
        if ways[-1].zero == 3:  # what left for the block behind this one stays until the next one leaves
            more = flat + ends + blocks.weight_grads + 2.0 * unit / held_weights.among
            moments.append((beside[1] + unit, more, top - blocks.last))
    if blocks.ahead:
        moments.append((beside[1], flat + (added if micros > 1 else 0.0), whole + blocks.ahead))
    if micros > 1:
        moments += [
            (beside[1], flat + added + late * widest, bottom),
            (beside[0], flat + added, whole + head + loss - fewer),
            (beside[1], flat + added + late * widest, top - fewer),
        ]
    return moments


def in_one_piece(plan: Plan, nbytes: float, zeros: Iterable[int]) -> bool:
    """Whether `shard` moves all weights of a stage at once, as parallel.shard does. nbytes: their size. zeros: the
    `zero` of each block, where some differ from the plan's."""
    return plan.shard > 1 and all(zero == 1 for zero in (plan.zero, *zeros)) and nbytes <= BUCKET


def _summed(model: Transformer, plan: Plan, share: RowShare, weights: _Held) -> float:
    """Bytes of gradients that travel in a buffer: over dp; and over cp where shard does not scatter them. Experts that
    no other rank of cp has wait for none there."""
    if plan.dp > 1:
        return weights.dealt
    if plan.cp == 1 or plan.shard > 1 or virtual_of(plan) > 1:
        return _ITEM * share.alone / weights.among  # of blocks that tp leaves whole, over tp
    alone = (
        model.experts and plan.ep * plan.tp > 1 and Transfer("experts", "all_reduce", 1.0).ranks(plan) == 1
    )
    return weights.dealt - (_ITEM * share.routed if alone else 0.0)


def _added(plan: Plan, weights: _Held, micros: int, waits: bool) -> float:
    """Bytes of gradients from one micro-batch to the next: of leaves that came, a partial sum for each level of their
    tree."""
    if leafwise(plan):
        return weights.dealt * (micros.bit_length() - 1)
    return weights.added if waits else 0.0


def _scattering(
    plan: Plan, zeros: tuple[int, int], share: RowShare, weights: _Held, sizes: _Sizes, grads: tuple[float, float],
    kept_by: tuple[float, float, float, float, float],
) -> list[tuple[float, float, float]]:  # fmt: skip
    """Return the moments at which gradients of the last block, of the first block and of the ends are being
    scattered. zeros: of the first and the last block."""
    (behind, fewer, last, first, carry), (flat, added) = kept_by, grads
    unit, ends, many = sizes.unit, _ITEM * share.ends, sizes.micros > 1
    # What leaves, what comes, and sums of it; the block's weights are gone after a step's last backward.
    each = 2.0 + 3.0 / weights.among
    low, high = (
        _gathered(plan, share, weights, unit) - (unit if zero == 1 or (zero == 2 and not many) else 0.0)
        for zero in zeros
    )
    before = (added - unit if zeros[1] == 1 else added + ends) if many else ends
    done = weights.dealt - 2.0 * unit / weights.among + ends
    moments = [(high + each * unit, flat + before, behind - last - (fewer if many else 0.0) + carry)]
    moments.append((_gathered(plan, share, weights, 0.0) + each * ends, flat + weights.dealt, carry))
    if zeros[0] == 3 or many:
        moments.append((low + each * unit, flat + done, first))
    return moments


def _sparse(model: Transformer, plan: Plan, row: int) -> tuple[float, float, float]:
    """Return the share of sparse layers: of a row's blocks, of its first block, of its last block."""
    experts, cut = model.experts, rows_of(model, plan.schedule, plan.pp, True)
    if experts is None or (plan.pp > 1 and len(of(plan.schedule).placement(plan.pp)) > plan.pp):
        return model.sparse_share, model.sparse_share, model.sparse_share
    first = round(sum(cut[:row]))
    stop = first + round(cut[row])
    mean = experts.layers(first, stop) / max(1, stop - first)
    return mean, float(experts.sparse(first)), float(experts.sparse(stop - 1))


def _kept(model: Transformer, way: Plan, micro_batch: int, e: int, sparse: float, mode: str = "") -> float:
    """Bytes of one block that is played as a plan says, or in another mode; nothing where it goes home."""
    if not mode and away_of(way).activations:
        return 0.0
    return activations.block_bytes(
        model, micro_batch=micro_batch, tp=way.tp, cp=way.cp, ep=way.ep, cp_kind=way.cp_kind,
        recompute=mode or way.recompute, itemsize=e, composed=True, sparse=sparse, shards=virtual_of(way),
    )  # fmt: skip


def _blocks(model: Transformer, plan: Plan, share: RowShare, shape: _Sizes, e: int) -> _Blocks:
    micro_batch, row = shape.micro_batch, shape.row
    ways, (mean, bottom, top) = in_order(model, plan, row), _sparse(model, plan, row)
    times, low, high = share.layers / len(ways), ways[0], ways[-1]
    each = {way: _kept(model, way, micro_batch, e, mean) for way in set(ways)}
    tokens = micro_batch * model.context / high.cp
    working = tokens * _ITEM * (model.d_ff + model.d_model) / high.tp
    if virtual_of(plan) > 1:
        working = virtual_kept().working_bytes(model, micro_batch, virtual_of(plan), high.tp, high.cp)
    weight_grads = _ITEM * model.d_model * model.d_ff / high.tp
    if top and model.experts:
        # The result of each choice with its gradient, and the gradients of both factors that made it.
        chosen = model.experts.top_k * max(1, high.tp // high.ep)
        working, weight_grads = tokens * _ITEM * model.d_model * (3 * chosen + 1) / high.tp, 0.0
    # Of what is at home, backward has of a block what its widest node reads: no more is fetched.
    read = tokens * _ITEM * 2 * model.d_ff / high.tp

    def again(way: Plan, sparse: float) -> float:
        if away_of(way).activations:
            return read
        return _kept(model, way, micro_batch, e, sparse, "none") - _kept(model, way, micro_batch, e, sparse)

    between, ahead, kept_now = [], 0.0, times * sum(each[way] for way in ways)
    for at, way in enumerate(ways):
        before = times * sum(each[earlier] for earlier in ways[:at])
        if away_of(way).activations:
            whole = _kept(model, way, micro_batch, e, mean, "none") + tokens * _ITEM * model.d_model / high.tp
            ahead = max(ahead, whole + before - kept_now)
        if shape.apart and away_of(way).activations:  # it is there, and the one to which backward comes next
            there = [w for w in ways[max(0, at - 1) : at + 1] if away_of(w).activations]
            weights = times * _ITEM * sum(dealt_elements(model, w) for w in ways[at + 1 :])
            fetched = sum(_kept(model, w, micro_batch, e, mean, "none") for w in there)
            between.append((weights, before + fetched + working + weight_grads * (plan.dp > 1)))
        if (
            0 < at < len(ways) - 1 and way != ways[at + 1]
        ):  # the last of its kind, to which backward comes first
            weights = _ITEM * sum(dealt_elements(model, earlier) for earlier in ways[at + 1 :])
            weights = times * weights + 0.5 * _ITEM * dealt_elements(model, way)
            between.append((weights, before + each[way] + again(way, mean) + working))
    first = _kept(model, low, micro_batch, e, bottom), again(low, bottom), again(high, top), working, ahead
    if away_of(high).activations:
        return _Blocks(kept_now, *first, weight_grads=weight_grads, between=tuple(between))
    done = _kept(model, high, micro_batch, e, top, "none") - activations.attention_bytes(
        model, micro_batch, high, e
    )
    at_work = first[2] - done + tokens * _ITEM * _attending(model, high) / high.tp
    unit = _ITEM * (dealt_elements(model, high) - model.d_model * model.qkv_width / high.tp)
    last = _kept(model, high, micro_batch, e, top)
    return _Blocks(kept_now, *first, last, at_work, weight_grads, unit, tuple(between))


def _attending(model: Transformer, plan: Plan) -> float:
    """Return the elements of one token in attention's backward pass: gradients of the residual stream, of the result
    before and after the last product, and of the queries; keys and values with their gradients, once for each copy
    that cp makes."""
    ways = {"ring": 6, "gather": 3 * plan.cp + 3}.get(plan.cp_kind, 4) if plan.cp > 1 else 3
    return 4 * model.d_model + 2 * ways * model.kv_width


def chosen(
    model: Transformer, plan: Plan, capacity: float, *, micro_batch: int, micros: int, apart: bool = False
) -> Plan | None:
    """Return the plan with the fewest recomputed blocks that fits into `capacity` bytes a rank; None where nothing
    fits. apart: as of `alive`."""

    def lacking(tried: Plan) -> int | None:
        row, memory = fullest(model, tried, micro_batch=micro_batch, micros=micros, apart=apart)
        return row if memory.total > capacity else None

    return fewest(plan, *stages_in(model, plan), lacking, selective=True)
