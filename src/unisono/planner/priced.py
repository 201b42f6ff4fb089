"""One door for what can be priced: a transformer, dealt along every axis, or a network of parts."""

from collections.abc import Sequence
from typing import TypeGuard

from unisono.plan import Plan
from unisono.planner import general, host, memory
from unisono.planner import price as transformers
from unisono.planner.memory import Again, Verdict
from unisono.planner.price import Price, Rows
from unisono.planner.stack import Stack
from unisono.spec.cluster import Cluster
from unisono.spec.networks import Network
from unisono.spec.transformer import Transformer

Model = Transformer | Network


def shares_cores(model: Model, cluster: Cluster) -> TypeGuard[Transformer]:
    """Whether the ranks share a measured host's cores: priced from what was measured there, timetable and all."""
    return cluster.host is not None and isinstance(model, Transformer) and model.experts is None


def price(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """Seconds of a step of `micros` micro-batches on every data rank."""
    if shares_cores(model, cluster):
        return host.price_on_host(model, plan, cluster, micro_batch=micro_batch, micros=micros)
    if isinstance(model, Network):
        return general.price(model, plan, cluster, stack, micro_batch=micro_batch, micros=micros)
    return transformers.price(model, plan, cluster, stack, micro_batch=micro_batch, micros=micros)


def rows(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, again: Sequence[Again] = ()
) -> Rows:
    """What each row of the pipeline takes for one micro-batch. again: by row, what recompute=auto computes again."""
    if isinstance(model, Network):
        each = general.rows(model, plan, cluster, stack, micro_batch)
        ways = tuple(row.forward for row in each), tuple(row.backward for row in each)
        return Rows(*ways, send=general.send(each, plan, cluster, stack, micro_batch))
    return transformers.rows(model, plan, cluster, stack, micro_batch, again)


def verdict(
    model: Model, plan: Plan, stack: Stack, cluster: Cluster, *, micro_batch: int, micros: int
) -> Verdict:
    """Memory of the fullest rank, and whether it fits. Ranks on one host share its memory."""
    if shares_cores(model, cluster) and cluster.host is not None:
        row, held = host.memory_on_host(model, plan, cluster.host, micro_batch=micro_batch, micros=micros)
        ranks = min(plan.world, cluster.links[0].size if cluster.links else 1)
        return Verdict(row, held, cluster.device.memory * cluster.host.cores / ranks)
    if isinstance(model, Network):
        return general.verdict(model, plan, stack, cluster.device, micro_batch=micro_batch, micros=micros)
    sizes = {"micro_batch": micro_batch, "micros": micros}
    again = transformers.computed_again(model, plan, cluster, stack, **sizes)
    return memory.verdict(model, plan, stack, cluster.device, again=again, **sizes)
