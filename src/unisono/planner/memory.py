"""Memory of every rank by category, at its peak, and whether it fits.

Model states: ZeRO (Rajbhandari et al., 2019): weights, gradients and optimiser of mixed-precision Adam, each whole or
shared out over `shard`. Activations: `spec.transformer`, times the micro-batches that the timetable holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated

from unisono.plan import Plan
from unisono.plan.grammar import choice
from unisono.planner.stack import Stack
from unisono.planner.timetables import WEIGHT_COPIES, in_flight
from unisono.spec.cluster import Device, Source
from unisono.spec.transformer import Transformer, block_bytes, head_bytes, live_bytes, stem_bytes

ITEM: Annotated[dict[str, int], Source("specification", "bytes of the dtype")] = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2,
}  # fmt: skip
BUCKET: Annotated[float, Source("assumed", "elements of gradients that are under way at a time")] = 25e6


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its peak. slack: what the allocator holds beside what was asked for."""

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
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the fullest rank fits: its pipeline row, its memory, what the device has for it, both in bytes."""

    row: int
    memory: Memory
    capacity: float

    @property
    def short(self) -> float:
        """Bytes that are missing, 0 where it fits."""
        return max(0.0, self.memory.total - self.capacity)

    @property
    def fits(self) -> bool:
        return self.short == 0.0


def states(
    parameters: float, *, shard: int, zero: int, precision: str, grad_bytes: int
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimiser for `parameters` elements, shared out over `shard` ranks by `zero`.

    Adam keeps two moments in fp32; below fp32 also a master copy of the weights: 2 + 2 + 12 bytes an element
    (Rajbhandari et al., 2019, section 3.1), or 2 + 4 + 12 where gradients add up in fp32.
    """
    item = ITEM[precision]
    wide = max(item, 4)
    weights, grads = item * parameters, (grad_bytes if item < 4 else item) * parameters
    optim = (2 * wide + (4 if item < 4 else 0)) * parameters
    return (
        weights / (shard if zero >= 3 else 1),
        grads / (shard if zero >= 2 else 1),
        optim / shard,
    )


def layers_of(row: int, ranks: int, n_layer: int) -> int:
    """Blocks of one row: as even as can be, outer rows, which also have stem and head, at most as many as others."""
    base, extra = divmod(n_layer, ranks)
    return base + (1 if 1 <= row <= extra or (row == 0 and extra == ranks) else 0)


def row_parameters(model: Transformer, plan: Plan, row: int) -> tuple[float, float]:
    """(elements in blocks, elements of stem and head) of one rank of a pipeline row."""
    dealt, whole = model.block_parameters
    blocks = layers_of(row, plan.pp, model.n_layer) * (dealt / plan.tp + whole)
    ends = 0.0
    if row == 0:
        ends += model.stem_parameters[0] / plan.tp + model.stem_parameters[1]
    if row == plan.pp - 1:
        # Tied weights exist once where one rank has both ends.
        matrix = 0.0 if model.tied and plan.pp == 1 else model.head_parameters[0] / plan.tp
        ends += matrix + model.head_parameters[1]
    return blocks, ends


def of_row(
    model: Transformer, plan: Plan, stack: Stack, *, micro_batch: int, micros: int, row: int
) -> Memory:
    """Memory of the ranks of one pipeline row."""
    blocks, ends = row_parameters(model, plan, row)
    copies = WEIGHT_COPIES.get(choice(plan.schedule).name, 1.0)
    params, grads, optim = states(
        blocks + ends, shard=plan.shard, zero=plan.zero, precision=plan.precision, grad_bytes=stack.grad_bytes
    )
    activations = _activations(model, plan, stack, micro_batch, micros, row)
    communication = _buffers(model, plan, blocks, ends)
    allocated = params * copies + grads * copies + optim + activations + communication
    return Memory(params * copies, grads * copies, optim, activations, communication, stack.slack * allocated)


def verdict(
    model: Transformer, plan: Plan, stack: Stack, device: Device, *, micro_batch: int, micros: int
) -> Verdict:
    """The fullest row against the device. Only rows that can be fullest are looked at: the ends and between."""
    rows = sorted({0, min(1, plan.pp - 1), plan.pp // 2, plan.pp - 1})
    each = [
        (of_row(model, plan, stack, micro_batch=micro_batch, micros=micros, row=row), row) for row in rows
    ]
    memory, row = max(each, key=lambda pair: pair[0].total)
    return Verdict(row, memory, device.memory - device.reserved)


def _activations(
    model: Transformer, plan: Plan, stack: Stack, micro_batch: int, micros: int, row: int
) -> float:
    item, layers = ITEM[plan.precision], layers_of(row, plan.pp, model.n_layer)
    fused = stack.fused_attention
    shared = stack.sequence_parallel
    mode = "full" if plan.recompute == "auto" else plan.recompute
    block = block_bytes(
        model, micro_batch=micro_batch, tp=plan.tp, cp=plan.cp, sequence_parallel=shared, fused=fused,
        recompute=mode, itemsize=item,
    )  # fmt: skip
    held = in_flight(plan.schedule, row, plan.pp, micros)
    total = layers * block * held
    if mode == "full":
        total += live_bytes(
            model, micro_batch=micro_batch, tp=plan.tp, cp=plan.cp, sequence_parallel=shared, fused=fused,
            itemsize=item,
        )  # fmt: skip
    if row == 0:
        total += stem_bytes(model, micro_batch=micro_batch, tp=plan.tp, cp=plan.cp) * held
    if row == plan.pp - 1:
        total += head_bytes(model, micro_batch=micro_batch, tp=plan.tp, cp=plan.cp, itemsize=item)
    return total


def _buffers(model: Transformer, plan: Plan, blocks: float, ends: float) -> float:
    """Communication buffers: ZeRO-3 holds two gathered blocks, a gathered end and one block's gradients; below that a
    bucket of gradients, of 25 million elements at most, where data ranks meet."""
    item = ITEM[plan.precision]
    if plan.shard > 1 and plan.zero == 3:
        block = model.block_parameters[0] / plan.tp
        return item * (2 * block + ends + block)
    if plan.shard > 1 or plan.dp > 1:
        return item * min(BUCKET, blocks + ends)
    return 0.0


def remedies(plan: Plan, micro_batch: int, micros: int, n_layer: int) -> Iterator[tuple[str, Plan, int, int]]:
    """(what to change, the plan, its micro-batch, its micros) that need less memory on as many ranks."""
    for mode in ("selective", "full"):
        if plan.recompute == "none" or (plan.recompute == "selective" and mode == "full"):
            yield f"recompute={mode}", replace(plan, recompute=mode), micro_batch, micros
    if micro_batch > 1 and micro_batch % 2 == 0:
        yield (
            f"micro_batch={micro_batch // 2}",
            replace(plan, micros=micros * 2),
            micro_batch // 2,
            micros * 2,
        )
    if plan.dp > 1:
        for zero in (1, 2, 3):
            shard = plan.dp * plan.shard
            if plan.shard == 1 or shard > plan.shard:
                yield (
                    f"dp=1 shard={shard} zero={zero}",
                    replace(plan, dp=1, shard=shard, zero=zero),
                    micro_batch,
                    micros,
                )
    elif plan.shard > 1 and plan.zero < 3:
        for zero in range(plan.zero + 1, 4):
            yield f"zero={zero}", replace(plan, zero=zero), micro_batch, micros
    for axis in ("tp", "pp"):
        for spare in ("dp", "shard"):
            size = getattr(plan, axis) * 2
            allowed = size <= 8 if axis == "tp" else size <= n_layer
            if getattr(plan, spare) % 2 == 0 and allowed:
                smaller = {axis: size, spare: getattr(plan, spare) // 2}
                changed = replace(plan, **smaller, micros=micros * 2)
                said = f"{axis}={size} {spare}={smaller[spare]}"
                yield said, changed, micro_batch, micros * 2
                yield f"{said} recompute=full", replace(changed, recompute="full"), micro_batch, micros * 2
