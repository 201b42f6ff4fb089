"""One door for what can be priced: a transformer, dealt along every axis, or a network of parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from unisono.plan import Plan
from unisono.planner import general, host, host_memory, memory
from unisono.planner import price as transformers
from unisono.planner.cuts import rows_of
from unisono.planner.machines.cluster import Cluster
from unisono.planner.memory import Again, MemoryVerdict
from unisono.planner.price import Price, Rows
from unisono.planner.stack import Stack
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError

Model = Transformer | Network


def shares_cores(model: Model, cluster: Cluster) -> TypeGuard[Transformer]:
    """Whether the ranks share a measured host's cores: priced from what was measured there, timetable and all."""
    return cluster.host is not None and isinstance(model, Transformer) and model.experts is None


def _as_measured(plan: Plan, cluster: Cluster) -> None:
    """Raises UsageError for a precision in which nobody has measured this host: its paces and bytes are those of fp32,
    and others follow from none of them."""
    if plan.precision != "fp32":
        raise UsageError(
            f"precision={plan.precision} has no price on {cluster.name}: its host was measured in fp32",
            where="plan.precision",
            fix="precision=fp32; unisono train runs a named plan without a price",
            code="C22",
        )


def price(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """Seconds of a step of `micros` micro-batches on every data rank. Raises UsageError for a precision in which a host
    was not measured."""
    sizes = {"micro_batch": micro_batch, "micros": micros}
    own = settled(model, plan, stack, cluster, **sizes)
    if shares_cores(model, cluster):
        _as_measured(plan, cluster)
        found = host.price_on_host(model, own, cluster, **sizes)
    elif isinstance(model, Network):
        found = general.price(model, own, cluster, stack, **sizes)
    else:
        return transformers.price(model, plan, cluster, stack, **sizes)
    if own is plan:
        return found
    again = tuple(
        Again(0.0, count * (own.recompute == "full")) for count in blocks(model, plan, stack, cluster)
    )
    return replace(found, again=again)


def settled(
    model: Model, plan: Plan, stack: Stack, cluster: Cluster, *, micro_batch: int, micros: int
) -> Plan:
    """Of networks of parts, and where ranks share a host's cores, recompute=auto is none where that fits, else full."""
    alike = isinstance(model, Network) or shares_cores(model, cluster)
    if plan.recompute != "auto" or not alike:
        return plan
    none = replace(plan, recompute="none")
    fits = verdict(model, none, stack, cluster, micro_batch=micro_batch, micros=micros).fits
    return none if fits else replace(plan, recompute="full")


def blocks(model: Model, plan: Plan, stack: Stack, cluster: Cluster) -> tuple[float, ...]:
    """How many each row of the pipeline has, stem and head not counted."""
    if shares_cores(model, cluster):
        return rows_of(model, plan.schedule, plan.pp, True)
    if isinstance(model, Network):
        ends = {0: 1, plan.pp - 1: 1} if plan.pp > 1 else {0: 2}
        return tuple(
            float(len(parts) - ends.get(i, 0)) for i, parts in enumerate(general.cut(model, plan.pp))
        )
    return rows_of(model, plan.schedule, plan.pp, stack.balanced)


def rows(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, again: Sequence[Again] = ()
) -> Rows:
    """What each row of the pipeline takes for one micro-batch. again: by row, what recompute=auto computes again."""
    if isinstance(model, Network):
        if plan.recompute == "auto":
            plan = replace(plan, recompute="full" if any(one.full for one in again) else "none")
        each = general.rows(model, plan, cluster, stack, micro_batch)
        ways = tuple(row.forward for row in each), tuple(row.backward for row in each)
        return Rows(*ways, send=general.send(each, plan, cluster, stack, micro_batch))
    return transformers.rows(model, plan, cluster, stack, micro_batch, again)


def verdict(
    model: Model, plan: Plan, stack: Stack, cluster: Cluster, *, micro_batch: int, micros: int
) -> MemoryVerdict:
    """Memory of the fullest rank, and whether it fits. Ranks on one host share its memory."""
    plan = settled(model, plan, stack, cluster, micro_batch=micro_batch, micros=micros)
    if shares_cores(model, cluster) and cluster.host is not None:
        _as_measured(plan, cluster)
        row, held = host_memory.memory_on_host(
            model, plan, cluster.host, micro_batch=micro_batch, micros=micros
        )
        ranks = min(plan.world, cluster.links[0].size if cluster.links else 1)
        return MemoryVerdict(row, held, cluster.device.memory * cluster.host.cores / ranks)
    if isinstance(model, Network):
        return general.verdict(model, plan, stack, cluster.device, micro_batch=micro_batch, micros=micros)
    sizes = {"micro_batch": micro_batch, "micros": micros}
    again = transformers.computed_again(model, plan, cluster, stack, **sizes)
    return memory.verdict(model, plan, stack, cluster.device, again=again, **sizes)
