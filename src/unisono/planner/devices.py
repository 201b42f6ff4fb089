"""Equal devices under a stack of software: price and memory of a request."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from unisono.planner.memory import Memory, MemoryVerdict, fullest
from unisono.planner.model_kinds import kind
from unisono.planner.price import price
from unisono.planner.price_parts import Price, Rows
from unisono.planner.request import PlanRequest


def closed(ask: PlanRequest) -> Price:
    """Seconds of a step by closed forms."""
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    return price(ask.model, ask.plan, ask.cluster, ask.stack, **sizes)


def rows(ask: PlanRequest) -> Rows:
    """Seconds of one micro-batch on each row of the pipeline."""
    return kind(ask.model).passes(ask.model, ask.plan, ask.cluster, ask.stack, ask.micro_batch, 1).rows


def verdict(ask: PlanRequest) -> MemoryVerdict:
    """Memory of the fullest rank, and whether it fits."""
    memories = kind(ask.model).memories(ask.model, ask.plan, ask.stack, ask.micro_batch, ask.micros)
    return fullest(_with_samples(ask, memories) if ask.by_sample else memories, ask.cluster.device)


def _with_samples(ask: PlanRequest, rows: Iterable[tuple[int, Memory]]) -> Iterator[tuple[int, Memory]]:
    """Add the gradients of a micro-batch's samples to the memory of each row. Where ranks shard, each gathers the
    weights for a step and adds up whole gradients."""
    alone = replace(ask.plan, shard=1, dp=ask.plan.dp * ask.plan.shard)
    sizes = ask.stack, ask.micro_batch, ask.micros
    whole = {row: memory.params for row, memory in kind(ask.model).memories(ask.model, alone, *sizes)}
    for row, memory in rows:
        gathered = memory.params + (whole[row] if ask.plan.shard > 1 and ask.plan.zero == 3 else 0.0)
        yield row, replace(memory, params=gathered, grads=whole[row] * (1 + ask.micro_batch))
