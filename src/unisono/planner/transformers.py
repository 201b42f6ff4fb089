"""A transformer on devices: what each row of the pipeline takes for one micro-batch, of what its passes do."""

from collections.abc import Iterator
from functools import reduce

from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.planner import gathering
from unisono.planner.collectives import message
from unisono.planner.cuts import rows_of
from unisono.planner.grouping import in_rows, is_uniform, together
from unisono.planner.machines.chip import PassSeconds, Traffic, joined, timer
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import stride, virtual_of
from unisono.planner.memory import Memory, learned, of_row, rows_seen, share_of
from unisono.planner.price_parts import Blocks, Detail, Kernels, KindOfBlock, Passes, Rows, Totals, owned
from unisono.planner.stack import Stack
from unisono.planner.states import item_of
from unisono.planner.timetables import ends
from unisono.planner.work import blocks as work
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import Problem


def kernels(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> Kernels:
    """What depends on tp, cp, ep, the micro-batch, recompute and precision alone."""
    on, ways = timer(plan, cluster, stack), (False, True)
    ahead, back = (on.of(work.block(model, plan, stack, micro_batch, backward=way)) for way in ways)
    more = on.of(work.again(model, plan, stack, micro_batch))
    stem = [on.of(work.stem(model, plan, micro_batch, backward=way)) for way in ways]
    head = [on.of(work.head(model, plan, stack, micro_batch, backward=way)) for way in ways]
    return Kernels(
        ahead,
        back + more,
        more,
        (_end(stem[0]), _end(stem[1])),
        (_end(head[0]), _end(head[1])),
        sum(end.arithmetic for end in head),
        reduce(joined, (end.talk for end in (*stem, *head)), {}),
    )


def _end(seconds: PassSeconds) -> float:
    """Seconds of stem or head, with what shows of what it sends."""
    return seconds.device + sum(traffic.exposed for traffic in seconds.talk.values())


def blocks(
    model: Transformer,
    plan: Plan,
    cluster: Cluster,
    stack: Stack,
    micro_batch: float,
    totals: Totals,
    alone: int = 1,
) -> Blocks:
    """A block with its weights on their way to and from shard. Of the plan only mesh, zero and precision are read: the
    rest may be arrays. alone: ranks of tp that have it whole."""
    gathered = gathering.shown(model, plan, cluster, stack, totals.ahead, totals.back, alone)
    stem, head = gathering.rims(model, plan, cluster, stack)
    return Blocks(
        forward=totals.ahead + gathered[0],
        backward=totals.back + gathered[1],
        stem=(totals.stem[0] + stem[0], totals.stem[1] + stem[1]),
        head=(totals.head[0] + head[0], totals.head[1] + head[1]),
        send=_send(model, plan, cluster, stack, micro_batch),
        shard=sum(gathered),
        rims=sum(stem) + sum(head),
    )


def row_seconds(each: Blocks, layers: float, stem: float, head: float) -> tuple[float, float]:
    """Seconds, forward and backward, of a row with so many blocks and such a share of stem and head."""
    return (
        layers * each.forward + stem * each.stem[0] + head * each.head[0],
        layers * each.backward + stem * each.stem[1] + head * each.head[1],
    )


def detail(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int) -> Detail:
    """What each row of the pipeline takes for one micro-batch, and what that comes from."""
    usual_kernels, each = usual = _priced(model, plan, cluster, stack, micro_batch)
    counts = rows_of(model, plan.schedule, plan.pp, stack.balanced)
    grouped = in_rows(model, plan, counts)
    kinds = {
        alike.plan: KindOfBlock(
            alike.plan,
            alike.blocks / sum(counts),
            *(
                usual
                if alike.plan == plan
                else _priced(model, alike.plan, cluster, stack, micro_batch, plan.tp // alike.plan.tp)
            ),
        )
        for alike in together(grouped)
    }
    stems, heads = ends(plan.schedule, plan.pp)
    pairs = []
    for row, groups in enumerate(grouped):
        f, b = row_seconds(each, 0.0, (row in stems) / len(stems), (row in heads) / len(heads))
        for alike in groups:
            more = row_seconds(kinds[alike.plan].blocks, alike.blocks, 0.0, 0.0)
            f, b = f + more[0], b + more[1]
        pairs.append((f, b))
    rows = Rows(tuple(f for f, _ in pairs), tuple(b for _, b in pairs), each.stem, each.head, each.send)
    return Detail(rows, usual_kernels, each, tuple(kinds.values()))


def _priced(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, alone: int = 1
) -> tuple[Kernels, Blocks]:
    seconds = kernels(model, plan, cluster, stack, micro_batch)
    return seconds, blocks(model, plan, cluster, stack, micro_batch, seconds.totals, alone)


def passes(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, micros: int
) -> Passes:
    """What the passes of a step take."""
    each = detail(model, plan, cluster, stack, micro_batch)
    first, layers, share = (
        learned(model, share_of(model, plan, 0, stack.balanced)),
        model.n_layer / plan.pp * micros,
        micros / plan.pp,
    )
    ends_ = sum(each.rows.stem) + sum(each.rows.head) - each.blocks.rims
    ends_ -= sum(traffic.exposed for traffic in each.kernels.rims.values())
    return Passes(
        rows=each.rows,
        handed=message_bytes(model, plan, stack, micro_batch),
        first=first,
        every=first,
        owned=owned(plan, first),
        inside=inside_blocks(model, plan, cluster, stack, each, micros),
        arithmetic=each.once("arithmetic") * layers + share * each.kernels.products,
        device=each.both("device") * layers + share * ends_,
        again=each.again("device") * layers,
        attention=each.once("attention") * layers,
    )


def _send(model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: float) -> float:
    """Seconds of one message between stages."""
    if plan.pp == 1:
        return 0.0
    moved = message_bytes(model, plan, stack, micro_batch)
    return message(cluster, stride(plan, "pp", cluster.order), moved, stack.p2p, plan.pp)


def message_bytes(model: Transformer, plan: Plan, stack: Stack, micro_batch: float) -> float:
    whole = micro_batch * model.context / plan.cp * model.d_model * item_of(plan, stack)
    if virtual_of(plan) > 1:  # by which positions are whole on tp
        return whole
    return whole / plan.tp if stack.scatter_gather or stack.sequence_parallel else whole


def inside_blocks(
    model: Transformer, plan: Plan, cluster: Cluster, stack: Stack, each: Detail, micros: int
) -> dict[str, Traffic]:  # fmt: skip
    """What is sent, and what of it shows, inside the passes over blocks, by axis."""
    layers = model.n_layer / plan.pp * micros
    traffic_by_axis: dict[str, Traffic] = {}
    for kind in each.kinds:
        both, many = joined(kind.kernels.ahead.talk, kind.kernels.back.talk), kind.part * layers
        of_kind = {axis: traffic * many for axis, traffic in both.items()}
        if kind.plan.tp < plan.tp and "cp" in of_kind:  # those ranks are of tp
            of_kind["tp"] = of_kind.pop("cp")
        if gathering.deals(kind.plan):
            alone = plan.tp // kind.plan.tp
            (sent, seconds), _ = gathering.total(model, kind.plan, cluster, stack, alone)
            of_kind["shard"] = Traffic(sent * many, seconds * many, kind.blocks.shard * many)
        traffic_by_axis = joined(traffic_by_axis, of_kind)
    rims = {axis: rim * (micros / plan.pp) for axis, rim in each.kernels.rims.items()}
    traffic_by_axis = joined(traffic_by_axis, rims)
    if gathering.deals(plan):
        _, of_ends = gathering.total(model, plan, cluster, stack)
        rim = Traffic(*(micros / plan.pp * part for part in (*of_ends, each.blocks.rims)))
        traffic_by_axis["shard"] = traffic_by_axis.get("shard", Traffic(0.0, 0.0, 0.0)) + rim
    return traffic_by_axis


def memories(
    model: Transformer, plan: Plan, stack: Stack, micro_batch: int, micros: int
) -> Iterator[tuple[int, Memory]]:
    """(row, its memory) of the rows that can be fullest."""
    for row in rows_seen(plan.pp) if is_uniform(plan) else range(plan.pp):
        yield row, of_row(model, plan, stack, micro_batch=micro_batch, micros=micros, row=row)


def layers(model: Transformer, plan: Plan, is_balanced: bool) -> tuple[float, ...]:
    """Blocks of each row of the pipeline."""
    return rows_of(model, plan.schedule, plan.pp, is_balanced)


def problems(model: Transformer, plan: Plan) -> list[Problem]:
    """What keeps a plan from being priced beside what `Plan.check` says: in two dims, products that our own GPT does
    not make."""
    if not isinstance(plan.tp, Grid) or (model.measured and not model.apart):
        return []
    what = f"tp={plan.tp}: products in rows and columns have a price for a model of kind gpt"
    return [Problem("P12", what, "plan.tp", f"tp={int(plan.tp)}, whose products are split in one row")]
