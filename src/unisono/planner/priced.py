"""One door for what can be priced: a transformer, dealt along every axis, or a network of parts."""

from unisono.plan import Plan
from unisono.planner import general, memory
from unisono.planner import price as transformers
from unisono.planner.memory import Verdict
from unisono.planner.price import Price, Rows
from unisono.planner.stack import Stack
from unisono.spec.cluster import Cluster, Device
from unisono.spec.networks import Network
from unisono.spec.transformer import Transformer

Model = Transformer | Network


def price(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """Seconds of a step of `micros` micro-batches on every data rank."""
    if isinstance(model, Network):
        return general.price(model, plan, cluster, stack, micro_batch=micro_batch, micros=micros)
    return transformers.price(model, plan, cluster, stack, micro_batch=micro_batch, micros=micros)


def rows(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, again: float = 0.0
) -> Rows:
    """What each row of the pipeline takes for one micro-batch, `again` blocks of it computed again (auto)."""
    if isinstance(model, Network):
        each = general.rows(model, plan, cluster, stack, micro_batch)
        ways = tuple(row.forward for row in each), tuple(row.backward for row in each)
        return Rows(*ways, send=general.send(each, plan, cluster, stack, micro_batch))
    return transformers.rows(model, plan, cluster, stack, micro_batch, again)


def verdict(
    model: Model, plan: Plan, stack: Stack, device: Device, *, micro_batch: int, micros: int
) -> Verdict:
    """Memory of the fullest rank, and whether it fits."""
    if isinstance(model, Network):
        return general.verdict(model, plan, stack, device, micro_batch=micro_batch, micros=micros)
    return memory.verdict(model, plan, stack, device, micro_batch=micro_batch, micros=micros)
