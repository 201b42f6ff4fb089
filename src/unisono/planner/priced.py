"""One door for what can be priced: a transformer, dealt along every axis, or a network of parts."""

from dataclasses import replace

from unisono.plan import Plan
from unisono.plan.grammar import choice, member
from unisono.planner import general, host, host_memory, memory, replicas, unlike
from unisono.planner import price as transformers
from unisono.planner.cuts import rows_of
from unisono.planner.machines.cluster import Cluster
from unisono.planner.memory import MemoryVerdict
from unisono.planner.parts import Rows
from unisono.planner.price import Model, Price
from unisono.planner.stack import Stack
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity


def shares_cores(model: Model, cluster: Cluster) -> bool:
    """Whether the ranks share a measured host's cores: priced from what was measured there, timetable and all."""
    return cluster.host is not None


def _known(model: Model, plan: Plan, cluster: Cluster) -> None:
    """Raises UsageError for what has no price: policies, codecs, collectives and offloading that nothing plays; and on
    a host what nobody has measured there. Its paces and bytes are those of fp32, and those of other precisions follow
    from none of them."""
    asked = {key: member(key, getattr(plan, key)) is None for key in ("sync", "codec", "collective")}
    asked |= {"offload": plan.offload != "none", "codec": asked["codec"] or bool(choice(plan.codec).marks)}
    if shares_cores(model, cluster):
        lossy = plan.dp > 1 and replicas.fidelity(plan)[0] is Fidelity.LOSSY
        asked |= {"cp": plan.cp > 1, "ep": plan.ep > 1, "precision": plan.precision != "fp32"}
        asked |= {key: asked[key] or lossy for key in ("sync", "codec")}
    for key, is_strange in asked.items():
        value, usual = getattr(plan, key), getattr(Plan(), key)
        if is_strange and value != usual:
            raise UsageError(
                f"{key}={value} has no price on {cluster.name}, where it was never measured",
                where=f"plan.{key}",
                fix=f"{key}={usual}; unisono train runs a named plan without a price",
                code="C22",
            )


def price(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Price:
    """Seconds of a step of `micros` micro-batches on every data rank. Raises UsageError for a precision in which a host
    was not measured."""
    _known(model, plan, cluster)
    sizes = {"micro_batch": micro_batch, "micros": micros}
    own = settled(model, plan, stack, cluster, **sizes)
    if cluster.rows and isinstance(model, Transformer):
        return unlike.price(model, own, cluster, stack, **sizes)
    if shares_cores(model, cluster):
        found = host.price_on_host(model, own, cluster, **sizes)
    else:
        found = transformers.price(model, own, cluster, stack, **sizes)
    return found


def settled(
    model: Model, plan: Plan, stack: Stack, cluster: Cluster, *, micro_batch: int, micros: int
) -> Plan:
    """recompute=auto is the first of none, selective and full that fits, which is the quickest; else full."""
    if plan.recompute != "auto":
        return plan
    scores = isinstance(model, Transformer) and not shares_cores(model, cluster) and not stack.fused_attention
    for mode in ("none", "selective") if scores else ("none",):
        own = replace(plan, recompute=mode)
        if verdict(model, own, stack, cluster, micro_batch=micro_batch, micros=micros).fits:
            return own
    return replace(plan, recompute="full")


def blocks(model: Model, plan: Plan, stack: Stack, cluster: Cluster) -> tuple[float, ...]:
    """How many each row of the pipeline has, stem and head not counted."""
    if isinstance(model, Network):
        ends = {0: 1, plan.pp - 1: 1} if plan.pp > 1 else {0: 2}
        return tuple(
            float(len(parts) - ends.get(i, 0)) for i, parts in enumerate(general.cut(model, plan.pp))
        )
    return rows_of(model, plan.schedule, plan.pp, stack.balanced or shares_cores(model, cluster))


def rows(model: Model, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> Rows:
    """What each row of the pipeline takes for one micro-batch."""
    if isinstance(model, Network):
        return general.passes(model, plan, cluster, stack, micro_batch, 1).rows
    if cluster.rows:
        return unlike.rows(model, plan, cluster, stack, micro_batch)
    return transformers.detail(model, plan, cluster, stack, micro_batch).rows


def verdict(
    model: Model, plan: Plan, stack: Stack, cluster: Cluster, *, micro_batch: int, micros: int
) -> MemoryVerdict:
    """Memory of the fullest rank, and whether it fits. Ranks on one host share its memory."""
    _known(model, plan, cluster)
    plan = settled(model, plan, stack, cluster, micro_batch=micro_batch, micros=micros)
    if cluster.rows and isinstance(model, Transformer):
        return unlike.verdict(model, plan, stack, cluster, micro_batch=micro_batch, micros=micros)
    if shares_cores(model, cluster) and cluster.host is not None:
        row, held = host_memory.memory_on_host(
            model, plan, cluster.host, micro_batch=micro_batch, micros=micros
        )
        ranks = min(plan.world, cluster.links[0].size if cluster.links else 1)
        return MemoryVerdict(row, held, cluster.device.memory * cluster.host.cores / ranks)
    if isinstance(model, Network):
        return memory.fullest(
            enumerate(general.rows_of_network(model, plan, stack, micro_batch, micros)), cluster.device
        )
    return memory.verdict(model, plan, stack, cluster.device, micro_batch=micro_batch, micros=micros)
