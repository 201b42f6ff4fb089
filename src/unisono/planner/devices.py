"""Equal devices under a stack of software: price and memory of a request."""

from unisono.planner.memory import MemoryVerdict, fullest
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
    return fullest(memories, ask.cluster.device)
