"""What `simulate` says of a plan on a mixture: where it lies, what it costs, what else was tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.planner.mixed import MixedAnswer, Placement, in_proportion, with_equal_layers
from unisono.planner.mixed_lane import MixedRow
from unisono.planner.simulate import GIB, gib
from unisono.planner.tell import drawn, in_parts, lasting


@dataclass(frozen=True, slots=True)
class Told:
    """A plan's best placement; the others; the step if layers were dealt as for equal devices, of stages; the step and
    each pool's micro-batches if the batch were dealt by speed, of replicas."""

    best: MixedAnswer
    others: tuple[MixedAnswer, ...]
    equal: MixedAnswer | None = None
    dealt: tuple[MixedAnswer, tuple[int, ...]] | None = None


def told(answers: Sequence[MixedAnswer]) -> Told:
    """The best of all placements, and what its choice is worth."""
    best, *others = answers
    where = best.placement
    if where.kind == "replicas":
        return Told(best, tuple(others), dealt=in_proportion(best.question, where))
    equal = with_equal_layers(best.question, where) if len(where.order) > 1 else None
    return Told(best, tuple(others), equal)


def waterfall(answer: MixedAnswer) -> list[tuple[str, float]]:
    """(what, seconds): all devices at their peaks, and what comes on top; the sum is the step."""
    ask, again = answer.question, answer.question.plan.recompute != "none"
    if answer.placement.kind == "stages":
        return in_parts(ask.model, ask.batch, answer.peak, answer.price, again)
    # Of the pool that sets the pace.
    slowest = max(answer.lanes, key=lambda one: one.price.step)
    device = ask.mixture.pools[slowest.rows[0].pool].device
    peak = ask.plan.world * device.flops(ask.plan.precision)
    (what, own), *rest = in_parts(ask.model, ask.batch, peak, answer.price, again)
    ideal = own * peak / answer.peak
    return [(what, ideal), ("equal shares for unequal devices", own - ideal), *rest]


def said(answer: MixedAnswer) -> str:
    """A placement in words."""
    return placed_in(answer.placement, [pool.name for pool in answer.question.mixture.pools])


def placed_in(where: Placement, names: Sequence[str]) -> str:
    """A placement in words."""
    if where.kind == "replicas":
        parts = [f"{count} replica{'s' * (count > 1)} on {names[pool]}" for pool, count in where.pools]
        return ", ".join(parts)
    parts, begun = [], 0
    for pool, count in where.pools:
        rows = f"row {begun}" if count == 1 else f"rows {begun} to {begun + count - 1}"
        parts.append(f"{rows} on {names[pool]}")
        begun += count
    return "pipeline " + ", ".join(parts)


def by_pool(answer: MixedAnswer) -> list[tuple[int, int, list[MixedRow]]]:
    """(pool, how many rows or replicas, its rows of the pipeline), in the order in which they are used."""
    found = []
    for place, (pool, count) in enumerate(answer.placement.pools):
        lane = answer.lanes[place if answer.placement.kind == "replicas" else 0]
        found.append((pool, count, [row for row in lane.rows if row.pool == pool]))
    return found


def layers_said(rows: Sequence[MixedRow]) -> str:
    low, high = min(row.layers for row in rows), max(row.layers for row in rows)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def cost(answer: MixedAnswer) -> float | None:
    """Of an hour of all devices of the plan; None where a pool's price is not known."""
    ask, spent = answer.question, 0.0
    ranks = ask.plan.world // sum(answer.placement.counts)
    for pool, count in answer.placement.pools:
        hourly = ask.mixture.pools[pool].cost_per_hour
        if hourly is None:
            return None
        spent += count * ranks * hourly
    return spent


def as_json(found: Told) -> Mapping[str, Any]:
    """The contract's object, and where the plan lies."""
    answer, ask, got = found.best, found.best.question, found.best.price
    place, row = answer.tightest
    hourly = cost(answer)
    return {
        "step_s": got.step,
        "error_pct": 100.0 * answer.trust.error,
        "error_because": list(because(answer)),
        "tflops_per_device": answer.tflops,
        "mfu": answer.mfu,
        "mem_gib": gib(row.memory),
        "capacity_gib": row.capacity / GIB,
        "fits": answer.fits,
        "bubble": answer.bubble,
        "comm": {
            axis: {"bytes": t.bytes, "seconds": t.seconds, "exposed_s": t.exposed}
            for axis, t in got.comm.items()
        },
        "days_to_train": answer.days,
        "tokens_per_s": ask.batch * ask.model.context / got.step,
        "samples_per_s": ask.batch / got.step,
        "cost": None if hourly is None else hourly * 24 * answer.days,
        "plan": str(ask.plan),
        "cluster": ask.mixture.name,
        "stack": ask.stack.name,
        "batch": {"global_batch": ask.batch, "micro_batch": ask.micro_batch, "micros": ask.micros},
        "waterfall": [{"what": what, "seconds": seconds} for what, seconds in waterfall(answer)],
        "fullest_row": place,
        "placement": placement_json(answer),
        "placements": [_other(one) for one in (answer, *found.others)],
        "equal_layers_step_s": found.equal.price.step if found.equal else None,
        "in_proportion": _dealt(found),
    }


def placement_json(answer: MixedAnswer) -> dict[str, Any]:
    mixture, places = answer.question.mixture, answer.placement
    return {
        "kind": places.kind,
        "said": said(answer),
        "join": {
            "name": mixture.join.name,
            "bandwidth_gb_s": mixture.join.bandwidth / 1e9,
            "latency_us": mixture.join.latency * 1e6,
            "source": str(mixture.join.sources.get("bandwidth", "")),
        },
        "pools": [
            {
                "pool": mixture.pools[pool].name,
                "device": mixture.pools[pool].device.name,
                places.kind if places.kind == "replicas" else "rows": count,
                "layers": [row.layers for row in rows],
                "micro_batch_s": max(row.forward + row.backward for row in rows),
                "mem_gib": max(row.memory.total for row in rows) / GIB,
                "capacity_gib": rows[0].capacity / GIB,
                "fits": not any(row.short for row in rows),
            }
            for pool, count, rows in by_pool(answer)
        ],
    }


def _other(answer: MixedAnswer) -> dict[str, Any]:
    return {"said": said(answer), "step_s": answer.price.step, "fits": answer.fits}


def _dealt(found: Told) -> dict[str, Any] | None:
    if found.dealt is None:
        return None
    answer, shares = found.dealt
    names = [answer.question.mixture.pools[pool].name for pool, _ in answer.placement.pools]
    return {"step_s": answer.price.step, "micros": dict(zip(names, shares, strict=True))}


def because(answer: MixedAnswer) -> tuple[str, ...]:
    return (*answer.trust.because, "no measurement of a mixture is in the repository")


def as_text(found: Told) -> str:
    """The same for people."""
    answer, ask, got = found.best, found.best.question, found.best.price
    join, kinds = (
        ask.mixture.join,
        " and ".join(f"{pool.devices} {pool.device.name}" for pool in ask.mixture.pools),
    )
    lines = [
        f"plan       {ask.plan}",
        f"cluster    {ask.mixture.name}: {kinds}, of which {_all_or(ask.plan.world, ask.mixture.devices)} work",
        f"           joined by {join.name}, {join.bandwidth / 1e9:g} GB/s a device and {join.latency * 1e6:g} us"
        f" ({join.sources.get('bandwidth', 'given')})",
        f"stack      {ask.stack.name}: a step is right within about {100 * answer.trust.error:.0f} % on average",
        *(f"           less sure: {reason}" for reason in because(answer)),
        f"batch      {ask.batch} = micro_batch {ask.micro_batch} x micros {ask.micros} x replicas {ask.plan.replicas}",
        "",
        *table(answer),
        "",
        *advice(found),
        "",
        f"step       {got.step:.4g} s, {ask.batch * ask.model.context / got.step:,.0f} tokens/s,"
        f" {answer.tflops:.3g} TFLOP/s of the mean device, MFU of all together {100 * answer.mfu:.1f} %",
    ]
    if ask.steps:
        lines.append(f"training   {lasting(86400.0 * answer.days)} for {ask.steps:,} steps")
        if (hourly := cost(answer)) is not None:
            lines.append(
                f"cost       {hourly * 24 * answer.days:,.0f} for the training, {hourly:,.0f} an hour"
            )
    lines += [
        f"bubble     {100 * answer.bubble:.1f} %",
        "",
        *drawn([{"what": what, "seconds": s} for what, s in waterfall(answer)], got),
    ]
    place, row = answer.tightest
    name = ask.mixture.pools[row.pool].device.name
    parts = "  ".join(f"{part} {size:.2f}" for part, size in gib(row.memory).items())
    lines += ["", f"memory     GiB of the tightest rank, pipeline row {place} on {name}: {parts}"]
    lines.append(f"           of {row.capacity / GIB:.2f} that {name} has for it")
    return "\n".join(lines)


def table(answer: MixedAnswer) -> list[str]:
    """One line a pool."""
    kind = "replicas" if answer.placement.kind == "replicas" else "rows"
    lines = [f"placement  {said(answer)}"]
    lines.append(
        f"  {'pool':<18}{'device':<14}{kind:>9}{'layers of a row':>17}{'s a micro-batch':>17}{'GiB':>8}{'of':>7}"
    )
    for pool, count, rows in by_pool(answer):
        own = answer.question.mixture.pools[pool]
        lines.append(
            f"  {own.name:<18}{own.device.name:<14}{count:>9}{layers_said(rows):>17}"
            f"{max(row.forward + row.backward for row in rows):>17.4f}"
            f"{max(row.memory.total for row in rows) / GIB:>8.1f}{rows[0].capacity / GIB:>7.1f}"
        )
    unused = [
        pool.name
        for place, pool in enumerate(answer.question.mixture.pools)
        if place not in answer.placement.order
    ]
    return [*lines, *([f"  nothing lies on {' and '.join(unused)}"] if unused else [])]


def advice(found: Told) -> list[str]:
    """Sentences on what the placement is worth, and what would be better."""
    answer, step = found.best, found.best.price.step
    lines: list[str] = []
    if found.equal is not None:
        more = found.equal.price.step / step - 1.0
        room = "" if found.equal.fits else " and would not fit"
        lines.append(
            f"layers     cut by the speed and memory of each row's device; equal layers would take"
            f" {found.equal.price.step:.4g} s ({100 * more:+.0f} %){room}, and that is how train cuts today"
        )
    if found.dealt is not None:
        dealt, shares = found.dealt
        names = [answer.question.mixture.pools[pool].name for pool, _ in answer.placement.pools]
        parts = " and ".join(f"{share} on {name}" for share, name in zip(shares, names, strict=True))
        slow = max(answer.lanes, key=lambda one: one.price.step)
        pace = answer.question.mixture.pools[slow.rows[0].pool].name
        less = 100 * (dealt.price.step / step - 1)
        lines += [
            f"shares     every replica has {answer.question.micros} micro-batches, so {pace} sets the pace; dealt by"
            f" speed ({parts})",
            f"           a step would take {dealt.price.step:.4g} s ({less:+.0f} %): train deals equal shares today",
        ]
    for other in found.others[:4]:
        room = "" if other.fits else f", short by {other.short / GIB:.1f} GiB"
        lines.append(
            f"otherwise  {said(other)}: {other.price.step:.4g} s ({100 * (other.price.step / step - 1):+.0f} %){room}"
        )
    return lines


def _all_or(used: int, devices: int) -> str:
    return "all" if used == devices else str(used)
