"""What exactness costs: the search over precision, sync and codec too, which change what is computed.

For each of them the best plan is searched, and the best of those that change nothing stands beside them. What a policy
keeps beside the model (what was not sent, an outer optimiser's state) is not in the memory that is priced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Annotated

from unisono.plan import choice
from unisono.plan.grammar import played
from unisono.planner.machines.cluster import Source
from unisono.planner.priced import shares_cores
from unisono.planner.search import Ranking, search
from unisono.planner.simulate import GIB, Answer
from unisono.planner.space import Space
from unisono.planner.tell import Column, Row, Told, fidelity, figure, table
from unisono.planner.work.transformer import Transformer
from unisono.spec.fidelity import Fidelity

_H = "steps between meetings: 8 of post-local SGD (Lin et al., 2020), 500 of DiLoCo (Douillard et al., 2023)"
POLICIES: Annotated[tuple[str, ...], Source("specification", _H)] = (
    "delayed", "local_sgd:h=8", "diloco:h=500", "gossip", "ssp:s=3", "async",
)  # fmt: skip
_R = "rank 4 (Vogels et al., 2019); error feedback where codes are biased (Karimireddy et al., 2019); else defaults"
CODECS: Annotated[tuple[str, ...], Source("specification", _R)] = (
    "cast:bf16", "int8", "qsgd", "ternary", "sign+ef", "topk+ef", "randomk+ef", "powersgd:r=4+ef",
)  # fmt: skip
BITS: Annotated[dict[str, int], Source("specification", "significant bits, IEEE 754 and bfloat16")] = {
    "fp64": 53, "fp32": 24, "fp16": 11, "bf16": 8,
}  # fmt: skip
_WORTH = 0.01  # of the step: who gives up more for less than that is not shown


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer, how close its result comes to one device's in the precision that was asked for, and why not closer."""

    answer: Answer
    fidelity: Fidelity
    why: str

    @property
    def step(self) -> float:
        return self.answer.price.step

    @property
    def given_up(self) -> frozenset[str]:
        """Keys that change what is computed."""
        lossy = self.fidelity is Fidelity.LOSSY
        return frozenset(part.partition("=")[0] for part in self.why.split("; ")) if lossy else frozenset()

    @property
    def trains(self) -> bool:
        """Whether this version plays such a policy, codec and precision, and does not only price them."""
        plan = self.answer.question.plan
        return all(choice(getattr(plan, key)).name in played(key) for key in ("sync", "codec", "precision"))


@dataclass(frozen=True, slots=True)
class FidelityCosts:
    """exact: the best of those that change nothing, as found without looking further; None where none fits. best: of
    each precision, policy and codec that is quicker than that the best plan, the quickest first. tried: how many plans
    were priced for that, in `seconds`."""

    exact: Judged | None
    best: tuple[Judged, ...]
    tried: int
    seconds: float

    @property
    def worth(self) -> tuple[Judged, ...]:
        """Of these what is quicker by a per cent than everything that gives up less."""
        some = (*self.best, *([self.exact] if self.exact is not None else ()))
        return tuple(
            one
            for one in self.best
            if all(one.step <= (1 - _WORTH) * other.step for other in some if other.given_up < one.given_up)
        )


def costs(space: Space, found: Ranking) -> FidelityCosts:
    """The best plans that change what is computed, beside `found`, which changes nothing: a search for each precision,
    policy and codec. space: of what can be priced, its held keys held here too."""
    begun, tried = perf_counter(), 0
    asked = space.held.precision
    exact = judged(found.best[0], asked) if found.best else None
    lossy: list[Judged] = []
    for precision in _precisions(space):
        for sync, codec in (("every_step", "plain"), *pairs(space)):
            held = replace(space.held, precision=precision, sync=sync, codec=codec)
            ranking = search(replace(space, held=held), top=1)
            tried += ranking.searched
            lossy += [
                one
                for one in (judged(best, asked) for best in ranking.best)
                if one.fidelity is Fidelity.LOSSY
            ]
    quicker = [one for one in lossy if exact is None or one.step < exact.step]
    quicker.sort(key=lambda one: (one.step, one.why.count(";")))
    return FidelityCosts(exact, tuple(quicker), tried, perf_counter() - begun)


def judged(answer: Answer, precision: str) -> Judged:
    """How close an answer's plan comes to one device in `precision`."""
    ask = answer.question
    found, why = fidelity(ask)
    own = BITS[ask.plan.precision]
    if own >= BITS[precision]:
        return Judged(answer, found, why)
    less = f"precision={ask.plan.precision}: numbers have {own} significant bits, not {BITS[precision]}"
    return Judged(answer, Fidelity.LOSSY, f"{less}; {why}" if found is Fidelity.LOSSY else less)


def _precisions(space: Space) -> Iterator[str]:
    """What was asked for, and what has fewer bits and a rate of its own on the device; all, where it is not held."""
    asked = space.held.precision
    yield asked
    if "precision" in space.held.said or shares_cores(space.model, space.cluster):
        return
    for other in ("fp32", "bf16", "fp16"):
        twin = other == "fp16" and "bf16" in space.cluster.device.peak
        if BITS[other] < BITS[asked] and other in space.cluster.device.peak and not twin:
            yield other


def pairs(space: Space) -> tuple[tuple[str, str], ...]:
    """(sync, codec) that are tried where there are replicas; what meets rarely needs no codec, what meets by peers or
    over a server has none here."""
    held = space.held
    if not isinstance(space.model, Transformer) or shares_cores(space.model, space.cluster):
        return ()
    found = [("every_step", codec) for codec in CODECS] + [(sync, "plain") for sync in POLICIES]
    return tuple(
        pair
        for pair in found
        if ("sync" not in held.said or pair[0] == held.sync)
        and ("codec" not in held.said or pair[1] == held.codec)
    )


def sentence(told: FidelityCosts) -> str:
    """What is given up for how much."""
    if told.exact is None:
        if not told.best:
            return "nothing fits, also where what is computed may change"
        first = told.best[0]
        return f"nothing that keeps what is computed fits; {first.step:.4g} s a step if given up: {first.why}"
    if not told.best:
        return "giving up exactness buys nothing here: no precision, policy or codec is quicker"
    first = (told.worth or told.best)[0]
    gain = told.exact.step / first.step - 1.0
    what = f"{gain + 1.0:.3g} times as fast" if gain >= 1.0 else f"{100 * gain:.1f} % faster"
    error = first.answer.error_pct
    if error is not None and 100.0 * gain < error:
        what += f", which is less than the {error:.0f} % by which prices err,"
    return f"{what} with {_named(first)}, and given up for it: {first.why}"


def _named(one: Judged) -> str:
    plan = one.answer.question.plan
    return " and ".join(f"{key}={getattr(plan, key)}" for key in sorted(one.given_up))


_COLUMNS = (
    Column("fidelity", "fidelity"), Column("s a step", "step_s", figure), Column("micro_batch", "micro_batch"),
    Column("plan, and what it gives up", "told"),
)  # fmt: skip


def told(found: FidelityCosts, most: int = 8) -> Told:
    """The key `fidelities`; for people the quickest that give something up, and the exact plan."""
    facts = {
        "says": sentence(found),
        "priced": found.tried,
        "seconds": found.seconds,
        "exact": None if found.exact is None else _row(found.exact, found.exact),
        "lossy": [_row(one, found.exact) for one in found.best],
    }
    shown = (found.worth or found.best[:1])[:most]
    some = [*shown, *([found.exact] if found.exact is not None else [])]
    lines = ["", f"what exactness costs: {facts['says']}"]
    lines += (
        table(_COLUMNS, [{**_row(one, found.exact), "told": _given_up(one)} for one in some]) if some else []
    )
    if len(found.best) > len(shown):
        lines.append(f"  {len(found.best) - len(shown)} more are quicker than exact, by less than a per cent beyond"
                     " what gives up less: --json has them")  # fmt: skip
    return {"fidelities": facts}, "\n".join(lines)


def _given_up(one: Judged) -> str:
    only = "" if one.trains else " (priced only: not yet in train)"
    return f"{one.answer.question.plan}: {one.why}{only}"


def _row(one: Judged, exact: Judged | None) -> Row:
    ask = one.answer.question
    return {
        "plan": str(ask.plan),
        "micro_batch": ask.micro_batch,
        "step_s": one.step,
        "mem_gib": one.answer.verdict.memory.total / GIB,
        "fidelity": one.fidelity.name,
        "gives_up": one.why if one.fidelity is Fidelity.LOSSY else None,
        "trains": one.trains,
        "faster_pct": None if exact is None else 100.0 * (exact.step / one.step - 1.0),
    }
