"""What to buy or to change next: one thing at a time is changed, and the step priced again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from unisono.planner.machines.cluster import Source
from unisono.planner.simulate import Question, rate, verdict_of
from unisono.planner.studies.scaled import scaled
from unisono.planner.tell import Told

_STEP = Source(
    "specification", "what is asked: small enough to be nearly linear, large enough to be a next model"
)
MORE: Annotated[float, _STEP] = 0.10
GIGABYTES: Annotated[float, _STEP] = 16.0
_WORTH = 1e-3  # of the tokens per second, below which nothing is said
_SHOWN = 6
_AGAIN = {
    "none": "keep all activations (recompute=none)",
    "selective": "compute attention's scores again (recompute=selective)",
    "full": "compute every block again (recompute=full)",
}


@dataclass(frozen=True, slots=True)
class Change:
    """kind: buy (hardware), plan (computes the same), recipe (computes something else). what: in words. gain: share
    of tokens per second more, negative for less. to: the plan and micro-batch, "" where they stay. fits: in memory."""

    kind: str
    what: str
    gain: float
    to: str = ""
    fits: bool = True

    def __str__(self) -> str:
        """As a newcomer reads it."""
        note = " (another recipe: the loss changes too)" if self.kind == "recipe" else ""
        note += "" if self.fits else " (does not fit in memory)"
        return f"{self.what}: {100 * abs(self.gain):.1f} % {'slower' if self.gain < 0 else 'faster'} training{note}"


def sensitivities(ask: Question) -> tuple[Change, ...]:
    """All changes that have a price, the most useful first."""
    now = rate(ask)
    found = [
        Change(kind, what, rate(other) / now - 1.0, to, verdict_of(other).fits)
        for kind, what, other, to in (*_hardware(ask), *_planned(ask), *_recipes(ask))
        if other.served
    ]
    return tuple(sorted([*found, _memory(ask, now)], key=lambda change: -change.gain))


Offer = tuple[str, str, Question, str]  # kind, what, the changed question, to


def _hardware(ask: Question) -> Iterator[Offer]:
    where, percent = ask.cluster, f"{100 * MORE:.0f} %"
    offers = [
        (f"{percent} more arithmetic (FLOP/s) in each device", scaled(where, "arithmetic", 1 + MORE)),
        (f"{percent} faster memory in each device", scaled(where, "memory_bandwidth", 1 + MORE)),
        *(
            (f"{percent} faster {one.name}", scaled(where, "bandwidth", 1 + MORE, one.name))
            for one in where.links
        ),
    ]
    if where.loader.samples or where.loader.bandwidth:
        offers.append((f"{percent} faster data loading on each host", scaled(where, "loader", 1 + MORE)))
    if where.links:
        offers.append((f"{percent} less latency on every link", scaled(where, "latency", 1 - MORE)))
    for what, offer in offers:
        yield "buy", what, replace(ask, cluster=offer), ""


def _planned(ask: Question) -> Iterator[Offer]:
    """Other ways to compute the same step on the same devices."""
    for mode, said in _AGAIN.items():
        if mode != ask.plan.recompute:
            other = replace(ask, plan=replace(ask.plan, recompute=mode))
            yield "plan", said, other, str(other.plan)
    if ask.micros % 2 == 0:
        other = dealt(ask, ask.micro_batch * 2, ask.micros // 2)
        yield (
            "plan",
            f"twice the micro-batch ({other.micro_batch})",
            other,
            f"micro_batch={other.micro_batch}",
        )
    if ask.micro_batch % 2 == 0:
        other = dealt(ask, ask.micro_batch // 2, ask.micros * 2)
        yield "plan", f"half the micro-batch ({other.micro_batch})", other, f"micro_batch={other.micro_batch}"


def dealt(ask: Question, micro_batch: int, micros: int) -> Question:
    """The same with other micro-batches."""
    return replace(ask, micro_batch=micro_batch, micros=micros, plan=replace(ask.plan, micros=micros))


def _recipes(ask: Question) -> Iterator[Offer]:
    """Twice and half the global batch: more or fewer micro-batches to accumulate."""
    for micros, word in ((ask.micros * 2, "twice"), (ask.micros // 2, "half")):
        if micros * 2 == ask.micros or micros > ask.micros:
            other = dealt(ask, ask.micro_batch, micros)
            yield "recipe", f"{word} the global batch ({other.batch})", other, f"global_batch={other.batch}"


def _memory(ask: Question, now: float) -> Change:
    """What more memory would let the plan do, beyond what it may do already: less computed again, larger
    micro-batches, fewer weights gathered."""
    device = ask.cluster.device
    larger = replace(ask.cluster, device=replace(device, memory=device.memory + GIGABYTES * 1e9))
    today, then, best = now, now, None
    for other in _roomier(ask):
        if not other.served or not verdict_of(replace(other, cluster=larger)).fits:
            continue
        gained = rate(other)
        if gained > then:
            then, best = gained, other
        if gained > today and verdict_of(other).fits:
            today = gained
    said = f"{GIGABYTES:.0f} GB more memory in each device"
    if best is None or then <= today:
        return Change("buy", said, 0.0)
    to = f"{best.plan}, micro_batch={best.micro_batch}"
    return Change("buy", f"{said}, for {_difference(ask, best)}", then / today - 1.0, to)


def _roomier(ask: Question) -> Iterator[Question]:
    zeros = range(1, ask.plan.zero + 1) if ask.plan.shard > 1 else (ask.plan.zero,)
    for mode in ("none", "selective", "full"):
        for zero in zeros:
            for times in (1, 2, 4):
                if ask.micros % times == 0:
                    changed = replace(ask, plan=replace(ask.plan, recompute=mode, zero=zero))
                    yield dealt(changed, ask.micro_batch * times, ask.micros // times)


def _difference(ask: Question, other: Question) -> str:
    said = [
        f"{key}={getattr(other.plan, key)}"
        for key in ("recompute", "zero")
        if getattr(other.plan, key) != getattr(ask.plan, key)
    ]
    if other.micro_batch != ask.micro_batch:
        said.append(f"micro_batch={other.micro_batch}")
    return " ".join(said)


def told(found: Sequence[Change]) -> Told:
    """All of them as JSON; the most useful that fit for people."""
    rows = [
        {"kind": c.kind, "what": c.what, "gain": c.gain, "to": c.to or None, "fits": c.fits, "says": str(c)}
        for c in found
    ]  # fmt: skip
    useful = [c for c in found if c.fits and c.gain >= _WORTH][:_SHOWN]
    nothing = ["nothing that was tried: no change of one thing gains 0.1 %"]
    return {"sensitivities": rows}, "\n  ".join(
        ["what would help", *(map(str, useful) if useful else nothing)]
    )
