"""Memory of every rank by category at its peak, and whether it fits.

Weights, gradients and optimiser states follow ZeRO (Rajbhandari et al., 2019): each is whole, or sharded over `shard`
and `cp`. Activations are those of `work`, times the micro-batches that the timetable holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.planner.cuts import rows_of
from unisono.planner.grouping import Alike, as_dealt, in_rows, is_uniform
from unisono.planner.machines.cluster import Device
from unisono.planner.machines.order import owners, virtual_of
from unisono.planner.source import Source
from unisono.planner.stack import Stack
from unisono.planner.states import item_of, moments_of, states, stored
from unisono.planner.timetables import chunks, copies, in_flight, of
from unisono.planner.timetables import ends as ends_of
from unisono.planner.work import activations as row_kept
from unisono.planner.work import expert_parallel
from unisono.planner.work.layouts import grid_kept
from unisono.planner.work.megatron_activations import block_bytes, head_bytes, owed_bytes, stem_bytes
from unisono.planner.work.stage import ITEM, Habits
from unisono.planner.work.transformer import Transformer, on_rank
from unisono.spec.numbers import smaller

_REDUCER = Source("specification", "our own reducer's buckets, in bytes: train.departures; as PyTorch's DDP")
BUCKET: Annotated[float, _REDUCER] = float(25 << 20)
_HELD = "the most that PyTorch's allocator held in 10 logged runs, 14 % of what was asked for; `slack` is the median"
# Of a rank's memory, what a plan that is chosen has to leave free beside it.
MARGIN: Annotated[float, Source("fitted", _HELD)] = 0.095


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its peak. slack: bytes that the allocator holds beyond what was asked for."""

    params: float = 0.0
    grads: float = 0.0
    optim: float = 0.0
    activations: float = 0.0
    communication: float = 0.0
    slack: float = 0.0

    @property
    def allocated(self) -> float:
        return self.total - self.slack

    @property
    def total(self) -> float:
        return self.params + self.grads + self.optim + self.activations + self.communication + self.slack


@dataclass(frozen=True, slots=True)
class RowShare:
    """The part of the model that a rank of one pipeline row has. Numbers, or arrays over timetables.

    blocks, ends: elements in blocks, in stem and head. layers: number of blocks. stem, head: 1.0 where the row has
    it, else 0.0. copies: how often the schedule keeps the weights. routed: elements of routed experts. ranks: ranks
    that shard the same experts, 0 without experts. stashed: versions of the weights beside the optimiser's.

    heaped: 1.0 where all forward passes come before the backward passes, so that the head keeps as many micro-batches
    as the blocks. late: 1.0 where weight gradients come so late that the head still owes its own of as many.

    apart: elements of blocks that another `zero` shards than the plan's, by that value. alone: elements of blocks
    that every rank of `tp` keeps whole.
    """

    blocks: float
    ends: float
    layers: float
    stem: float
    head: float
    copies: float
    routed: float = 0.0
    heaped: float = 0.0
    late: float = 0.0
    ranks: int = 0
    stashed: float = 0.0
    apart: tuple[tuple[int, float], ...] = ()
    alone: float = 0.0

    @property
    def elements(self) -> float:
        """All of them, those that the schedule keeps several times counted once."""
        return (self.blocks + self.ends + self.routed) / self.copies


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one micro-batch keeps for the backward pass. Numbers, or arrays.

    block: of each block. live: extra bytes of the one block that is being recomputed. stem, head: of these. loss:
    extra bytes beside the head while the loss's gradient is computed. owed: of the head until its weight gradient is
    computed, where that comes apart.
    """

    block: float
    live: float
    stem: float
    head: float
    loss: float = 0.0
    owed: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Whether the fullest rank fits. row: its pipeline row. memory: what it needs. capacity: what the device has, in
    bytes."""

    row: int
    memory: Memory
    capacity: float

    @property
    def short(self) -> float:
        """Bytes that are missing; 0 where it fits."""
        return max(0.0, self.memory.total - self.capacity)

    @property
    def is_safe(self) -> bool:
        """Whether it fits with `MARGIN` to spare: as much as an allocator was ever seen to hold. A plan chosen for a
        user has to."""
        return self.memory.total * (1.0 + MARGIN) <= self.capacity

    @property
    def fits(self) -> bool:
        return self.short == 0.0


def share_of(model: Transformer, plan: Plan, row: int, is_balanced: bool) -> RowShare:
    """Return the share of one pipeline row."""
    return share_in(model, plan, row, rows_of(model, plan.schedule, plan.pp, is_balanced))


def share_in(model: Transformer, plan: Plan, row: int, cut: Sequence[float]) -> RowShare:
    """Return the share of one pipeline row, where rows have `cut` blocks."""
    layers, (dealt, whole) = cut[row], model.block_parameters
    times, schedule = copies(plan.schedule, plan.pp), of(plan.schedule)
    stems, heads = ends_of(plan.schedule, plan.pp)
    first, last = row in stems, row in heads
    ends = end_elements(model, plan, first, last)
    elements, alone = dict[int, float](), 0.0
    # Most plans of a search are uniform, and are not looked up.
    for alike in (Alike(plan, layers),) if is_uniform(plan) else in_rows(model, plan, tuple(cut))[row]:
        here = alike.blocks * times * on_rank(alike.plan.tp, dealt, whole)
        elements[alike.plan.zero] = elements.get(alike.plan.zero, 0.0) + here
        alone += here if alike.plan.tp < plan.tp else 0.0
    blocks = sum(elements.values())
    routed, ranks = _experts_in(model, plan, row, cut)
    return RowShare(
        blocks,
        ends,
        layers,
        float(first),
        float(last),
        times,
        times * routed,
        float(schedule.heaped),
        float(schedule.late),
        ranks,
        schedule.stashed(row, plan.pp, plan.micros or plan.pp) if plan.pp > 1 else 0.0,
        tuple((zero, here) for zero, here in elements.items() if zero != plan.zero),
        alone,
    )


def learned(model: Transformer, share: RowShare) -> RowShare:
    """Return the trainable part of a row's share."""
    if not model.lora:
        return share
    part = model.learns
    apart = tuple((zero, part * count) for zero, count in share.apart)
    routed = part * share.routed
    return replace(
        share,
        blocks=part * share.blocks,
        ends=part * share.ends,
        routed=routed,
        apart=apart,
        alone=part * share.alone,
    )


def by_zero(plan: Plan, share: RowShare) -> tuple[tuple[Plan, RowShare], ...]:
    """Split a row's share by the `zero` that shards it: pairs of a plan that shards everything so, and its share. The
    plan's own `zero` comes first, with stem and head."""
    if not share.apart:
        return ((plan, share),)
    rest = replace(share, blocks=share.blocks - sum(count for _, count in share.apart), apart=())
    none = {"ends": 0.0, "routed": 0.0, "ranks": 0, "apart": ()}
    return (plan, rest), *(
        (as_dealt(plan, zero), replace(share, blocks=count, **none)) for zero, count in share.apart
    )


def groups_of(plan: Plan, share: RowShare) -> list[tuple[float, int]]:
    """Return (elements, ranks that shard them): of the model without routed experts, and of these."""
    groups = [(share.blocks + share.ends, owners(plan)[0])]
    return [*groups, (share.routed, share.ranks)] if share.ranks else groups


def end_elements(model: Transformer, plan: Plan, stem: bool, head: bool) -> float:
    """Return the elements of stem and head on one rank."""
    elements = on_rank(plan.tp, *model.stem_parameters) if stem else 0.0
    if head:
        # Tied weights exist once where one rank has both ends.
        matrix, rest = model.head_parameters
        elements += on_rank(plan.tp, 0.0 if model.tied and stem else matrix, rest)
    return elements


def kept_of(model: Transformer, plan: Plan, stack: Habits, micro_batch: int) -> Kept:
    """Return what one micro-batch keeps on a rank."""
    # Nobody else plays grids, or computes by virtual shards.
    if isinstance(plan.tp, Grid) or virtual_of(plan) > 1 or (stack.autograd and model.latent is None):
        return _kept_by_us(model, plan, stack, micro_batch)
    item, fused, shared = ITEM[plan.precision], stack.fused_attention, stack.sequence_parallel

    def block(mode: str) -> float:
        return block_bytes(
            model, micro_batch=micro_batch, tp=plan.tp, cp=plan.cp, ep=plan.ep, sequence_parallel=shared, fused=fused,
            recompute=mode, itemsize=item, eight=plan.arithmetic.fp8,
        )  # fmt: skip

    # What is computed again is there while its block's backward pass is: all of it, or the scores.
    live = block("none") - block(plan.recompute)
    sizes = {"micro_batch": micro_batch, "tp": plan.tp, "cp": plan.cp}
    return Kept(
        block=block(plan.recompute),
        live=live,
        stem=stem_bytes(model, **sizes),
        head=head_bytes(model, itemsize=item, **sizes),
        owed=owed_bytes(model, itemsize=item, **sizes),
    )


def kept_in(
    model: Transformer, plan: Plan, stack: Habits, micro_batch: int, row: int, cut: Sequence[float]
) -> Kept:
    """Return what one micro-batch keeps on a rank of a row whose blocks are played in several ways: of the mean
    block, and of the largest to recompute."""
    usual = kept_of(model, plan, stack, micro_batch)
    kinds = () if is_uniform(plan) else in_rows(model, plan, tuple(cut))[row]
    if all(alike.plan == plan for alike in kinds):
        return usual
    each = [(kept_of(model, alike.plan, stack, micro_batch), alike.blocks / cut[row]) for alike in kinds]
    block = sum(kept.block * part for kept, part in each)
    return replace(usual, block=block, live=max(kept.live for kept, _ in each))


def of_share(
    model: Transformer, plan: Plan, stack: Stack, share: RowShare, kept: Kept, held: float
) -> Memory:
    """Return the memory of a rank with this share and `held` micro-batches in flight.

    Of the plan only mesh, zero and precision are read: the other arguments may be arrays.
    """
    moments = moments_of(model, plan, share.elements * model.learns, share.layers)
    dtypes: dict[str, Any] = {
        "precision": stored(plan, stack), "grad_bytes": stack.grad_bytes, "moments": moments,
        "masters": not plan.arithmetic.stochastic,
    }  # fmt: skip
    params = grads = optim = 0.0
    for dealt, part in by_zero(plan, share):
        for elements, ranks in groups_of(plan, part):
            more = states(elements, shard=ranks, zero=dealt.zero, **dtypes)
            params = params + more[0]
            grads, optim = grads + more[1] * model.learns, optim + more[2] * model.learns
    params = params * (1.0 + share.stashed)
    optim = optim / share.copies  # each copy's optimiser is that of the other
    activations = at_peak(held, *passing(share, kept))
    communication = sum(
        _buffers(model, dealt, stack, part.blocks, part.ends) for dealt, part in by_zero(plan, share)
    )
    allocated = params + grads + optim + activations + communication
    return Memory(params, grads, optim, activations, communication, stack.slack * allocated)


def passing(share: RowShare, kept: Kept) -> tuple[float, float, float]:
    """Return bytes of activations of a row: what each micro-batch keeps, what each further one keeps for the head,
    and what is added while a backward pass begins."""
    each = share.layers * kept.block + share.stem * kept.stem
    owed = share.head * (share.heaped * kept.head + share.late * kept.owed)
    return each, owed, kept.live + share.head * (kept.head + kept.loss)


def at_peak(held: float, each: float, owed: float, working: float) -> float:
    """Return bytes of activations of `held` micro-batches as the first backward pass begins."""
    return held * each + (held - 1.0) * owed + working


def _experts_in(model: Transformer, plan: Plan, row: int, layers: Sequence[float]) -> tuple[float, int]:
    """Return (elements of routed experts on one rank of a row, ranks that shard the same experts; 0 without experts).
    A row with one stage has the sparse layers that lie there, a row with several its share of all."""
    if model.experts is None:
        return 0.0, 0
    first = sum(layers[:row])
    if chunks(plan.schedule) == 1 and first == int(first) and layers[row] == int(layers[row]):
        layered = float(model.experts.layers(int(first), int(first + layers[row])))
    else:
        layered = layers[row] * model.sparse_share
    layer, ranks = expert_parallel.elements(model, plan)
    return layered * layer, ranks


def of_row(
    model: Transformer, plan: Plan, stack: Stack, *, micro_batch: int, micros: int, row: int
) -> Memory:  # fmt: skip
    """Return the memory of the ranks of one pipeline row."""
    cut = rows_of(model, plan.schedule, plan.pp, stack.balanced)
    share, kept = share_in(model, plan, row, cut), kept_in(model, plan, stack, micro_batch, row, cut)
    held = in_flight(plan.schedule, row, plan.pp, micros)
    return of_share(model, plan, stack, share, kept, held)


def rows_seen(ranks: int) -> list[int]:
    """Return the rows that can be fullest: the ends, and one between."""
    return sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1})


def verdict(
    model: Transformer, plan: Plan, stack: Stack, device: Device, *, micro_batch: int, micros: int
) -> MemoryVerdict:
    """Hold the fullest row against the device."""
    sizes = {"micro_batch": micro_batch, "micros": micros}
    return fullest(
        ((row, of_row(model, plan, stack, **sizes, row=row)) for row in rows_seen(plan.pp)), device
    )


def fullest(rows: Iterable[tuple[int, Memory]], device: Device) -> MemoryVerdict:
    """Hold the fullest of some rows against the device."""
    row, memory = max(rows, key=lambda pair: pair[1].total)
    return MemoryVerdict(row, squeezed(memory, device.room), device.room)


def squeezed(memory: Memory, capacity: float) -> Memory:
    """Return the memory with as much slack as there is room for. Before it fails, PyTorch's allocator gives back what
    it only caches: of ten logged runs the one nearest to its limit had 0.8 % slack, one with room to spare 14 %."""
    return replace(memory, slack=min(memory.slack, max(0.0, capacity - memory.allocated)))


def _kept_by_us(model: Transformer, plan: Plan, stack: Habits, micro_batch: int) -> Kept:
    """Return what one micro-batch of our own GPT keeps."""
    item = ITEM[plan.precision]
    forms: Any = grid_kept() if isinstance(plan.tp, Grid) else row_kept
    shards = {"shards": virtual_of(plan)} if forms is row_kept else {}
    sizes = micro_batch, plan.tp, plan.cp, item

    def block(recompute: str) -> float:
        return forms.block_bytes(
            model, micro_batch=micro_batch, tp=plan.tp, cp=plan.cp, ep=plan.ep, cp_kind=plan.cp_kind,
            recompute=recompute, itemsize=item, composed=stack.composed, **shards,
        )  # fmt: skip

    # Fused attention keeps no scores that could be left out; that of virtual shards writes them.
    modes = ("full", "selective") if virtual_of(plan) > 1 else ("full",)
    mode = plan.recompute if plan.recompute in modes else "none"
    return Kept(
        block=block(mode),
        live=block("none")
        - block(mode)
        + (forms.meeting_bytes(model, *sizes) if forms is not row_kept else 0.0),
        stem=forms.stem_bytes(model, *sizes, **shards),
        head=forms.head_bytes(model, *sizes, composed=stack.composed, **shards),
        loss=forms.loss_bytes(model, *sizes),
        owed=forms.owed_bytes(model, *sizes),
    )


def _buffers(model: Transformer, plan: Plan, stack: Stack, blocks: float, ends: float) -> float:
    """Return bytes of communication buffers. ZeRO-3 holds two gathered blocks, a gathered end and one block's
    gradients; below that there is a bucket of gradients where data ranks meet."""
    item = item_of(plan, stack)
    if plan.shard > 1 and plan.zero == 3:
        block = model.block_parameters[0] / plan.tp
        held, ranks = expert_parallel.elements(model, plan)
        block += held if ranks > 1 else 0.0
        return item * (2 * block + ends + block)
    if plan.shard > 1 or plan.dp > 1:
        return smaller(BUCKET, item * (blocks + ends))
    return 0.0
