"""What to buy or to change next: one thing at a time is changed, and the step priced again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from unisono.plan.grid import Grid
from unisono.planner.formatting import Description, Row
from unisono.planner.machines.cluster import Link
from unisono.planner.model_kinds import attending
from unisono.planner.pricing import verdict
from unisono.planner.simulate import PlanRequest, rate
from unisono.planner.source import Source

_STEP = Source(
    "specification", "what is asked: small enough to be nearly linear, large enough to be a next model"
)
MORE: Annotated[float, _STEP] = 0.10
GIGABYTES: Annotated[float, _STEP] = 16.0
_WORTH = 1e-3  # of the tokens per second, below which nothing is said
_SHOWN = 6
_CHUNKS = 4  # of tp, the most that a search tries
_AGAIN = {
    "none": "keep all activations (recompute=none)",
    "selective": "compute attention's scores again (recompute=selective)",
    "full": "compute every block again (recompute=full)",
}


def change(kind: str, what: str, gain: float, to: str = "", fits: bool = True) -> Row:
    """kind: buy (hardware), plan (computes the same), recipe (computes something else). gain: share of tokens per
    second more, negative for less. to: the plan and micro-batch, "" where they stay. fits: in memory."""
    note = " (another recipe: the loss changes too)" if kind == "recipe" else ""
    note += "" if fits else " (does not fit in memory)"
    says = f"{what}: {100 * abs(gain):.1f} % {'slower' if gain < 0 else 'faster'} training{note}"
    return {"kind": kind, "what": what, "gain": gain, "to": to or None, "fits": fits, "says": says}


def sensitivities(ask: PlanRequest) -> list[Row]:
    """All changes that have a price, the most useful first."""
    now = rate(ask)
    changes = [
        change(kind, what, rate(other) / now - 1.0, to, verdict(other).fits)
        for kind, what, other, to in (*_hardware(ask), *_planned(ask), *_recipes(ask))
        if other.served
    ]
    return sorted([*changes, _memory(ask, now)], key=lambda row: -row["gain"])


Offer = tuple[str, str, PlanRequest, str]  # kind, what, the changed request, to


def _hardware(ask: PlanRequest) -> Iterator[Offer]:
    where, device, more, percent = ask.cluster, ask.cluster.device, 1.0 + MORE, f"{100 * MORE:.0f} %"
    peak = {dtype: flops * more for dtype, flops in device.peak.items()}
    offers = [
        (f"{percent} more arithmetic (FLOP/s) in each device",
         replace(where, device=replace(device, peak=peak))),
        (f"{percent} faster memory in each device",
         replace(where, device=replace(device, bandwidth=device.bandwidth * more))),
    ]  # fmt: skip
    for link in where.links:
        links = tuple(faster(other, more) if other.name == link.name else other for other in where.links)
        offers.append((f"{percent} faster {link.name}", replace(where, links=links)))
    load = where.loader
    if load.samples or load.bandwidth:
        loader = replace(load, samples=load.samples * more, bandwidth=load.bandwidth * more)
        offers.append((f"{percent} faster data loading on each host", replace(where, loader=loader)))
    if where.links:
        links = tuple(replace(other, latency=other.latency * (1.0 - MORE)) for other in where.links)
        offers.append((f"{percent} less latency on every link", replace(where, links=links)))
    for what, cluster in offers:
        yield "buy", what, replace(ask, cluster=cluster), ""


def faster(link: Link, factor: float) -> Link:
    """The link with so many times its bandwidth, for groups of any size."""
    return replace(
        link,
        bandwidth=link.bandwidth * factor,
        ceiling=link.ceiling * factor if link.ceiling is not None else None,
        groups=tuple((members, rate * factor) for members, rate in link.groups),
    )


def _planned(ask: PlanRequest) -> Iterator[Offer]:
    """Other ways to compute the same step on the same devices."""
    for mode, said in _AGAIN.items():
        if mode != ask.plan.recompute:
            other = replace(ask, plan=replace(ask.plan, recompute=mode))
            yield "plan", said, other, str(other.plan)
    plan, ours = (
        ask.plan,
        ask.stack.autograd and attending(ask.model) is not None and not ask.cluster.cores,
    )
    if (
        ours
        and plan.tp > 1
        and plan.chunks == 1
        and not isinstance(plan.tp, Grid)
        and not plan.arithmetic.fp8
    ):
        cut = replace(plan, tp=f"{plan.tp}:chunks={_CHUNKS}")  # type: ignore[arg-type]
        yield "plan", f"products of tp in chunks (tp={cut.text('tp')})", replace(ask, plan=cut), str(cut)
    for odd, size, micros, word in (
        (ask.micros % 2, ask.micro_batch * 2, ask.micros // 2, "twice"),
        (ask.micro_batch % 2, ask.micro_batch // 2, ask.micros * 2, "half"),
    ):
        if not odd:
            yield "plan", f"{word} the micro-batch ({size})", dealt(ask, size, micros), f"micro_batch={size}"


def dealt(ask: PlanRequest, micro_batch: int, micros: int) -> PlanRequest:
    """The same with other micro-batches."""
    return replace(ask, micro_batch=micro_batch, micros=micros, plan=replace(ask.plan, micros=micros))


def _recipes(ask: PlanRequest) -> Iterator[Offer]:
    """Twice and half the global batch: more or fewer micro-batches to accumulate."""
    for micros, word in ((ask.micros * 2, "twice"), (ask.micros // 2, "half")):
        if micros * 2 == ask.micros or micros > ask.micros:
            other = dealt(ask, ask.micro_batch, micros)
            yield "recipe", f"{word} the global batch ({other.batch})", other, f"global_batch={other.batch}"


def _memory(ask: PlanRequest, now: float) -> Row:
    """What more memory would let the plan do, beyond what it may do already: less computed again, larger
    micro-batches, fewer weights gathered."""
    device = ask.cluster.device
    larger = replace(ask.cluster, device=replace(device, memory=device.memory + GIGABYTES * 1e9))
    today, then, best = now, now, None
    for other in _roomier(ask):
        if not other.served or not verdict(replace(other, cluster=larger)).fits:
            continue
        gained = rate(other)
        if gained > then:
            then, best = gained, other
        if gained > today and verdict(other).fits:
            today = gained
    said = f"{GIGABYTES:.0f} GB more memory in each device"
    if best is None or then <= today:
        return change("buy", said, 0.0)
    mine, other = _memory_keys(ask), _memory_keys(best)
    keys = " ".join(f"{key}={value}" for key, value in other.items() if value != mine[key])
    return change(
        "buy", f"{said}, for {keys}", then / today - 1.0, f"{best.plan}, micro_batch={best.micro_batch}"
    )


def _memory_keys(ask: PlanRequest) -> dict[str, object]:
    """What decides how much of a step is kept."""
    return {"recompute": ask.plan.recompute, "zero": ask.plan.zero, "micro_batch": ask.micro_batch}


def _roomier(ask: PlanRequest) -> Iterator[PlanRequest]:
    zeros = range(1, ask.plan.zero + 1) if ask.plan.shard > 1 else (ask.plan.zero,)
    for mode in ("none", "selective", "full"):
        for zero in zeros:
            for times in (1, 2, 4):
                if ask.micros % times == 0:
                    changed = replace(ask, plan=replace(ask.plan, recompute=mode, zero=zero))
                    yield dealt(changed, ask.micro_batch * times, ask.micros // times)


def describe(changes: Sequence[Row]) -> Description:
    """The key `sensitivities`, all of them; the most useful that fit for people."""
    useful = [row["says"] for row in changes if row["fits"] and row["gain"] >= _WORTH][:_SHOWN]
    nothing = ["nothing that was tried: no change of one thing gains 0.1 %"]
    return {"sensitivities": list(changes)}, "\n  ".join(["what would help", *(useful or nothing)])
