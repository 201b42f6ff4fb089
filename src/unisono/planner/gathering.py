"""Weights that are gathered, and gradients that are scattered, on `shard` under zero=3: of blocks, of stem and head."""

from collections.abc import Iterable

from unisono.plan import Plan
from unisono.planner.collectives import bus, uncovered
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import owners
from unisono.planner.stack import Stack
from unisono.planner.states import item_of
from unisono.planner.work import expert_parallel, wire_formats
from unisono.planner.work.transformer import Transformer, on_rank

Sent = tuple[float, float]  # bytes that a rank sends, seconds


def deals(plan: Plan) -> bool:
    """Whether weights have to be gathered before they are used."""
    return plan.shard > 1 and plan.zero == 3


def block(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, alone: int = 1
) -> tuple[Sent, Sent]:
    """Return (bytes, seconds) to gather one block's weights, and to scatter its gradients. alone: ranks of tp that
    keep the block whole; they split positions as ranks of cp do, but no weights."""
    held, ranks = expert_parallel.elements(model, plan)
    dealt, whole = model.block_parameters
    groups = [(on_rank(plan.tp, dealt, whole), owners(plan)[0] // alone)]
    if held:
        groups.append((model.sparse_share * held, ranks))
    return moved(groups, plan, cluster, stack, model.learns)


def ends(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack) -> tuple[tuple[Sent, Sent], ...]:
    """Return (bytes, seconds) to gather and to scatter, of the stem and of the head. With one stage a tied weight is
    gathered once."""
    matrix, norm = model.head_parameters
    last = on_rank(plan.tp, 0.0 if model.tied and plan.pp == 1 else matrix, norm)
    return tuple(
        moved([(elements, owners(plan)[0])], plan, cluster, stack, model.learns)
        for elements in (on_rank(plan.tp, *model.stem_parameters), last)
    )


def moved(
    groups: list[tuple[float, int]], plan: Plan, cluster: Cluster, stack: Stack, learns: float = 1.0
) -> tuple[Sent, Sent]:
    """Return (bytes, seconds) to gather and to scatter groups of (elements, ranks that shard them). learns: share of
    the elements that have gradients."""
    whole = wire_formats.gathered(plan, item_of(plan, stack))
    summed = learns * wire_formats.scattered(plan, stack.reduce_bytes)
    return price_groups(groups, plan, cluster, stack, whole), price_groups(
        groups, plan, cluster, stack, summed
    )


def price_groups(
    groups: Iterable[tuple[float, int]], plan: Plan, cluster: Cluster, stack: Stack, item: float
) -> Sent:
    """Return (bytes, seconds) to gather or to scatter groups of (elements, ranks that shard them) once. item: bytes of
    an element."""
    sent = seconds = 0.0
    every, near = owners(plan, cluster.order)
    for elements, ranks in groups:
        net, moved = bus(cluster, near * every // ranks, ranks, stack.dp_bus), elements * item
        sent, seconds = sent + net.sent(moved) / 2, seconds + net.gather(moved)
    return sent, seconds


def shown(
    model: Transformer,
    plan: Plan,
    cluster: Cluster,
    stack: Stack,
    ahead: float,
    back: float,
    alone: int = 1,
) -> tuple[float, float]:
    """Return exposed seconds of a block's weights and gradients, forward and backward. Weights are gathered before
    both passes and gradients scattered after the second, while a neighbouring block computes for `ahead` and `back`
    seconds. alone: see `block`."""
    if not deals(plan):
        return 0.0, 0.0
    gathered, scattered = block(model, plan, cluster, stack, alone)
    talk, hidden = (gathered[1], gathered[1] + scattered[1]), stack.dp_hidden
    return uncovered(talk[0], ahead, hidden), uncovered(talk[1], back, hidden)


def rims(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack) -> tuple[Sent, Sent]:
    """Return seconds of stem and head, (forward, backward) each. They belong to FSDP2's root, which is gathered
    before a pass, stays until its end, and is scattered last, so nothing hides them."""
    if not deals(plan):
        return (0.0, 0.0), (0.0, 0.0)
    stem, head = ends(model, plan, cluster, stack)
    return (stem[0][1], stem[1][1]), (head[0][1], head[1][1])


def total(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, alone: int = 1
) -> tuple[Sent, Sent]:
    """Return (bytes, seconds) of one micro-batch: of one block in both passes, and of stem and head together. alone:
    see `block`."""
    gathered, scattered = block(model, plan, cluster, stack, alone)
    pairs = [traffic for end in ends(model, plan, cluster, stack) for traffic in end]
    return (
        (2 * gathered[0] + scattered[0], 2 * gathered[1] + scattered[1]),
        (sum(sent for sent, _ in pairs), sum(seconds for _, seconds in pairs)),
    )
