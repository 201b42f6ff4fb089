"""What to buy or to change next: one thing at a time is changed, and the step priced again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from unisono.planner import changes
from unisono.planner.machines.cluster import Cluster, Source
from unisono.planner.quick import judged, rate
from unisono.planner.simulate import Question

_STEP = Source(
    "specification", "what is asked: small enough to be nearly linear, large enough to be a next model"
)
MORE: Annotated[float, _STEP] = 0.10
GIGABYTES: Annotated[float, _STEP] = 16.0
_WORTH = 1e-3  # of the tokens per second, below which nothing is said


@dataclass(frozen=True, slots=True)
class Change:
    """kind: buy (hardware), plan (computes the same), recipe (computes something else). what: in words. gain: share
    of tokens per second more, negative for less. to: the plan and micro-batch, "" where they stay. fits: in memory."""

    kind: str
    what: str
    gain: float
    to: str = ""
    fits: bool = True


def sensitivities(ask: Question) -> tuple[Change, ...]:
    """All changes that have a price, the most useful first."""
    now = rate(ask)
    found = [*_hardware(ask, now), *_planned(ask, now), *_recipes(ask, now), *_memory(ask, now)]
    return tuple(sorted(found, key=lambda change: -change.gain))


def _hardware(ask: Question, now: float) -> Iterator[Change]:
    where, percent = ask.cluster, f"{100 * MORE:.0f} %"
    offers: list[tuple[str, Cluster]] = [
        (f"{percent} more arithmetic (FLOP/s) in each device", changes.faster_arithmetic(where, 1 + MORE)),
        (f"{percent} faster memory in each device", changes.faster_memory(where, 1 + MORE)),
    ]
    offers += [
        (f"{percent} faster {link.name}", changes.faster_link(where, link.name, 1 + MORE))
        for link in where.links
    ]
    if where.loader.samples or where.loader.bandwidth:
        offers.append((f"{percent} faster data loading on each host", changes.faster_loader(where, 1 + MORE)))
    if where.links:
        offers.append((f"{percent} less latency on every link", changes.quicker_links(where, 1 - MORE)))
    for what, offer in offers:
        yield Change("buy", what, rate(replace(ask, cluster=offer)) / now - 1.0)


def _planned(ask: Question, now: float) -> Iterator[Change]:
    """Other ways to compute the same step on the same devices."""
    for mode in ("none", "selective", "full", "auto"):
        if mode != ask.plan.recompute:
            other = replace(ask, plan=replace(ask.plan, recompute=mode))
            said = {"none": "keep all activations (recompute=none)",
                    "selective": "compute attention's scores again (recompute=selective)",
                    "full": "compute every block again (recompute=full)",
                    "auto": "compute again only what does not fit (recompute=auto)"}[mode]  # fmt: skip
            yield Change("plan", said, rate(other) / now - 1.0, str(other.plan), judged(other).fits)
    for other, said in _micro_batches(ask):
        if other.served:
            gain, fits = rate(other) / now - 1.0, judged(other).fits
            yield Change("plan", said, gain, f"micro_batch={other.micro_batch}", fits)


def _micro_batches(ask: Question) -> Iterator[tuple[Question, str]]:
    """Twice and half the micro-batch at the same global batch."""
    if ask.micros % 2 == 0:
        yield (
            _dealt(ask, ask.micro_batch * 2, ask.micros // 2),
            f"twice the micro-batch ({ask.micro_batch * 2})",
        )
    if ask.micro_batch % 2 == 0:
        yield (
            _dealt(ask, ask.micro_batch // 2, ask.micros * 2),
            f"half the micro-batch ({ask.micro_batch // 2})",
        )


def _dealt(ask: Question, micro_batch: int, micros: int) -> Question:
    return replace(ask, micro_batch=micro_batch, micros=micros, plan=replace(ask.plan, micros=micros))


def _recipes(ask: Question, now: float) -> Iterator[Change]:
    """Twice and half the global batch: more or fewer micro-batches to accumulate."""
    sizes = [(ask.micros * 2, "twice")] + ([(ask.micros // 2, "half")] if ask.micros % 2 == 0 else [])
    for micros, word in sizes:
        other = _dealt(ask, ask.micro_batch, micros)
        if not other.served:
            continue
        said = f"{word} the global batch ({other.batch})"
        yield Change(
            "recipe", said, rate(other) / now - 1.0, f"global_batch={other.batch}", judged(other).fits
        )


def _memory(ask: Question, now: float) -> Iterator[Change]:
    """What more memory would let the plan do, beyond what it may do already: less computed again, larger
    micro-batches, fewer weights gathered."""
    larger = changes.more_memory(ask.cluster, GIGABYTES * 1e9)
    today, then = now, now
    best: Question | None = None
    for other in _roomier(ask):
        if not other.served or not judged(replace(other, cluster=larger)).fits:
            continue
        gained = rate(other)
        if gained > then:
            then, best = gained, other
        if gained > today and judged(other).fits:
            today = gained
    said = f"{GIGABYTES:.0f} GB more memory in each device"
    if best is None or then <= today:
        yield Change("buy", said, 0.0)
        return
    to = f"{best.plan}, micro_batch={best.micro_batch}"
    yield Change("buy", f"{said}, for {_difference(ask, best)}", then / today - 1.0, to)


def _roomier(ask: Question) -> Iterator[Question]:
    zeros = range(1, ask.plan.zero + 1) if ask.plan.shard > 1 else (ask.plan.zero,)
    for mode in ("none", "selective", "full"):
        for zero in zeros:
            for times in (1, 2, 4):
                if ask.micros % times == 0:
                    changed = replace(ask, plan=replace(ask.plan, recompute=mode, zero=zero))
                    yield _dealt(changed, ask.micro_batch * times, ask.micros // times)


def _difference(ask: Question, other: Question) -> str:
    said = [
        f"{key}={getattr(other.plan, key)}"
        for key in ("recompute", "zero")
        if getattr(other.plan, key) != getattr(ask.plan, key)
    ]
    if other.micro_batch != ask.micro_batch:
        said.append(f"micro_batch={other.micro_batch}")
    return " ".join(said)


def sentence(change: Change) -> str:
    """As a newcomer reads it."""
    if change.gain < 0.0:
        told = f"{-100 * change.gain:.1f} % slower training"
    else:
        told = f"{100 * change.gain:.1f} % faster training"
    note = " (another recipe: the loss changes too)" if change.kind == "recipe" else ""
    note += "" if change.fits else " (does not fit in memory)"
    return f"{change.what}: {told}{note}"


def as_json(found: Sequence[Change]) -> Mapping[str, Any]:
    """The key that `simulate --json` gains."""
    rows = [
        {"kind": c.kind, "what": c.what, "gain": c.gain, "to": c.to or None, "fits": c.fits, "says": sentence(c)}
        for c in found
    ]  # fmt: skip
    return {"sensitivities": rows}


def as_text(found: Sequence[Change], most: int = 6) -> str:
    """The most useful that fit."""
    useful = [c for c in found if c.fits and c.gain >= _WORTH][:most]
    lines = ["what would help"]
    lines += [f"  {sentence(change)}" for change in useful]
    if not useful:
        lines.append("  nothing that was tried: no change of one thing gains 0.1 %")
    return "\n".join(lines)


__all__ = ["Change", "as_json", "as_text", "sensitivities", "sentence"]
