"""What `offload` costs: seconds of copies to and from homes beside a step, and the memory that is left.

On a device a copy takes a stream of its own, and shows where it takes longer than the pass that it belongs to; copies
of an update all show. On a host of ranks it is a kernel like others, on the same cores; pages of a file are the host's
memory until the system writes them out, so both homes cost the same.
"""

from dataclasses import fields, replace

from unisono.plan import Plan
from unisono.plan.blocks import Away, away_in, away_of, ranges_of, text_of
from unisono.planner.alive import alive
from unisono.planner.grouping import in_order, is_uniform
from unisono.planner.machines.chip import Traffic
from unisono.planner.memory import MemoryVerdict
from unisono.planner.model_kinds import attending
from unisono.planner.price_parts import Price
from unisono.planner.request import PlanRequest
from unisono.planner.work.offload_copies import Copied, copied
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError

AXIS = "home"  # under which copies are told beside traffic


def with_homes(got: Price, ask: PlanRequest) -> Price:
    """The price with what is copied. Raises UsageError where nobody has said how fast that is."""
    if not put_away(ask.plan):
        return got
    model, rows = _model(ask), range(ask.plan.pp)
    each = [copied(model, ask.plan, ask.micro_batch, row, ask.stack.composed) for row in rows]
    if _on_host(ask):
        took = _on_cores(each, ask, 1.0 / (ask.cluster.device.bandwidth * ask.stack.elementwise))
    else:
        took = _on_device(each, ask, got)
    return replace(got, step=got.step + took.exposed, comm={**got.comm, AXIS: took})


def put_away(plan: Plan) -> Away:
    """Return what is offloaded of any part of the model. All parts share one target."""
    ranges = (blocks.says("offload") for blocks in ranges_of(plan.blocks))
    every = (away_of(plan), *(away_in(text) for text in ranges if text is not None))
    return Away(*(any(getattr(blocks, kind.name) for blocks in every) for kind in fields(Away)))


def at_home(plan: Plan) -> Plan:
    """Return the plan without offloading."""
    ranges = tuple(
        replace(blocks, said=tuple(pair for pair in blocks.said if pair[0] != "offload"))
        for blocks in ranges_of(plan.blocks)
    )
    return replace(plan, offload="none", blocks=text_of(ranges))


def verdict(ask: PlanRequest, usual: MemoryVerdict) -> MemoryVerdict:
    """Hold the fullest rank with what stays on the device against it. usual: the verdict without offloading. What CPU
    ranks offload to memory stays in that memory."""
    away = put_away(ask.plan)
    if not away:
        return usual
    model, slack = _model(ask), usual.memory.slack / usual.memory.allocated
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    rows = [alive(model, ask.plan, **sizes, row=row, apart=not _on_host(ask)) for row in range(ask.plan.pp)]
    if ask.cluster.cores and not away.on_disk:
        plain = at_home(ask.plan)
        rows = [
            max(memory, alive(model, plain, **sizes, row=row, apart=False), key=lambda m: m.total)
            for row, memory in enumerate(rows)
        ]
    row = max(range(len(rows)), key=lambda r: rows[r].total)
    return replace(usual, row=row, memory=replace(rows[row], slack=slack * rows[row].total))


def _on_host(ask: PlanRequest) -> bool:
    return bool(ask.cluster.cores) or ask.cluster.device.name == "cpu"


def _model(ask: PlanRequest) -> Transformer:
    model = attending(ask.model)
    if model is None:
        raise UsageError(
            f"offload={ask.plan.offload}: what is put away has a price for models with attention",
            where="plan.offload, model.kind", fix="offload=none; unisono train runs a named plan without a price",
            code="C22",
        )  # fmt: skip
    return model


def _on_cores(each: list[Copied], ask: PlanRequest, pace: float) -> Traffic:
    """Return the mean row's copies on a CPU. pace: seconds of a byte read or written, on cores that also compute."""
    moved = sum(copies.of_step(ask.micros) for copies in each) / len(each)
    update = sum(2.0 * copies.step for copies in each) / len(each)
    return Traffic(moved, 2.0 * pace * moved, 2.0 * pace * moved, 2.0 * pace * update)


def _on_device(each: list[Copied], ask: PlanRequest, got: Price) -> Traffic:
    """Return the copies of the row that exposes most. A forward pass is a third of a micro-batch's computation; a
    quarter where all blocks are recomputed."""
    rate = _rate(ask)
    whole = got.busiest / ask.micros
    ahead = whole / (3.0 + _again(ask))
    rows = list[Traffic]()
    for copies in each:
        forward, back, step = (
            nbytes / rate for nbytes in (max(copies.left, copies.ahead), copies.back, copies.step)
        )  # both ways at once
        shown = ask.micros * (max(0.0, forward - ahead) + max(0.0, back - (whole - ahead))) + step
        rows.append(Traffic(copies.of_step(ask.micros), ask.micros * (forward + back) + step, shown, step))
    return max(rows, key=lambda traffic: (traffic.exposed, traffic.bytes))


def _again(ask: PlanRequest) -> float:
    """Return the share of blocks that are recomputed as a whole."""
    if is_uniform(ask.plan) or attending(ask.model) is None:
        return float(ask.plan.recompute == "full")
    ways = [way for row in range(ask.plan.pp) for way in in_order(_model(ask), ask.plan, row)]
    return sum(way.recompute == "full" for way in ways) / len(ways)


def _rate(ask: PlanRequest) -> float:
    """Bytes/s of one device to its home and back, each way."""
    cluster = ask.cluster
    rate, missing = (
        cluster.device.host * ask.stack.host_link,
        "host, bytes/s between a device and its host's memory",
    )
    if rate and put_away(ask.plan).on_disk:
        node = cluster.loader.devices or cluster.node
        rate, missing = (
            min(rate, cluster.loader.bandwidth / node),
            "loader.bandwidth, bytes/s of a host's storage",
        )
    if not rate:
        raise UsageError(
            f"offload={ask.plan.offload} has no price on {cluster.name}: nobody has said how fast its copies are",
            where="plan.offload", fix=f"{missing}, in a cluster file of your own; or offload=none", code="C22",
        )  # fmt: skip
    return rate
