"""The legal plans for a cluster, priced, and the best of them with the reason why each next one loses.

Only what this version trains is searched: `dp`, `shard` with `zero`, `tp`, `pp` with its timetables, `recompute`, and
the micro-batch where the recipe leaves it open. Every device of the cluster is used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from unisono.plan import Plan
from unisono.plan.checks import divisors
from unisono.plan.grammar import BUILT
from unisono.planner.memory import Verdict, verdict
from unisono.planner.price import Price, price
from unisono.planner.simulate import GIB, Answer, Question, simulate, waterfall
from unisono.planner.stack import Stack
from unisono.spec.cluster import Cluster
from unisono.spec.transformer import Transformer

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MOST_NODES = 1 << 14


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched. held: the plan that gives everything that is not, and the keys that it says. batch: samples of
    a step. micro_batch: the recipe's, or None. legal: what else a plan must be."""

    model: Transformer
    cluster: Cluster
    stack: Stack
    batch: int
    micro_batch: int | None
    held: Plan
    legal: Callable[[Plan], bool] = lambda plan: True


@dataclass(frozen=True, slots=True)
class Found:
    """searched: legal plans that were priced. feasible: those that fit. best: answers, the best first."""

    searched: int
    feasible: int
    seconds: float
    best: tuple[Answer, ...]
    nearest: Answer | None  # the plan that is short of least, where none fits


def search(space: Space, top: int = 4, objective: str = "time") -> Found:
    """The `top` best plans by seconds of a step, or by memory of the fullest rank."""
    begun = perf_counter()
    priced: list[tuple[Price, Verdict, Plan, int]] = []
    for plan, micro_batch in candidates(space):
        micros = plan.micros or 1
        given = (space.model, plan)
        fits = verdict(*given, space.stack, space.cluster.device, micro_batch=micro_batch, micros=micros)
        cost = price(*given, space.cluster, space.stack, micro_batch=micro_batch, micros=micros)
        priced.append((cost, fits, plan, micro_batch))

    def answer(one: tuple[Price, Verdict, Plan, int]) -> Answer:
        _, _, plan, micro_batch = one
        return simulate(
            Question(space.model, plan, space.cluster, space.stack, micro_batch, plan.micros or 1)
        )

    keys: Mapping[str, Callable[[tuple[Price, Verdict, Plan, int]], tuple[float, float, str]]] = {
        "time": lambda one: (one[0].step, one[1].memory.total, str(one[2])),
        "memory": lambda one: (one[1].memory.total, one[0].step, str(one[2])),
    }
    fitting = sorted((one for one in priced if one[1].fits), key=keys[objective])
    nearest = min(priced, key=lambda one: one[1].short, default=None)
    return Found(
        len(priced),
        len(fitting),
        perf_counter() - begun,
        tuple(answer(one) for one in fitting[:top]),
        answer(nearest) if nearest is not None and not fitting else None,
    )


def candidates(space: Space) -> Iterator[tuple[Plan, int]]:
    """(plan, its micro-batch): every legal way to deal the batch to all devices."""
    model, world = space.model, space.cluster.devices
    for tp in _values(space, "tp", divisors(world)):
        if model.n_head % tp or model.kv_heads % tp:
            continue
        for pp in _values(space, "pp", divisors(world // tp)):
            if pp > model.n_layer or world % (tp * pp):
                continue
            for shard in _values(space, "shard", divisors(world // tp // pp)):
                if world % (tp * pp * shard):
                    continue
                mesh = {"tp": tp, "pp": pp, "shard": shard, "dp": world // (tp * pp * shard)}
                if "dp" in space.held.said and space.held.dp not in (-1, mesh["dp"]):
                    continue
                yield from _ways(space, mesh)


def _ways(space: Space, mesh: dict[str, int]) -> Iterator[tuple[Plan, int]]:
    """The other keys on one mesh."""
    share, uneven = divmod(space.batch, mesh["dp"] * mesh["shard"])
    if uneven:
        return
    schedules = [name for name in BUILT["schedule"] if name != "accumulate"] if mesh["pp"] > 1 else [None]
    for zero in _values(space, "zero", (1, 2, 3) if mesh["shard"] > 1 else (space.held.zero,)):
        for recompute in _values(space, "recompute", BUILT["recompute"]):
            for schedule in _values(space, "schedule", schedules):
                for micro_batch in _micro_batches(space, share):
                    named = {"zero": zero, "recompute": recompute, "micros": share // micro_batch}
                    if schedule is not None:
                        named["schedule"] = schedule
                    plan = replace(space.held, **mesh, **named, said=frozenset({*mesh, *named}))
                    if space.legal(plan):
                        yield plan, micro_batch


def _values(space: Space, key: str, free: Sequence[Any]) -> Sequence[Any]:
    return (getattr(space.held, key),) if key in space.held.said else free


def _micro_batches(space: Space, share: int) -> Sequence[int]:
    if space.micro_batch is not None:
        return (space.micro_batch,) if share % space.micro_batch == 0 else ()
    if "micros" in space.held.said and space.held.micros:
        return (share // space.held.micros,) if share % space.held.micros == 0 else ()
    return [size for size in _MICRO_BATCHES if share % size == 0]


def smallest(space: Space, scaled: Callable[[int], Cluster]) -> tuple[Cluster, Answer] | None:
    """The first of 1, 2, 4 … nodes of which a plan fits, and its fastest plan; scaled(nodes) makes the cluster."""
    nodes = 1
    while nodes <= _MOST_NODES:
        larger = scaled(nodes)
        if larger.devices > space.cluster.devices:
            found = search(replace(space, cluster=larger, held=replace(space.held, dp=-1)), top=1)
            if found.best:
                return larger, found.best[0]
        nodes *= 2
    return None


def why(answer: Answer, best: Answer) -> str:
    """One sentence: what binds the best plan, or where another loses most against it."""
    own = dict(waterfall(answer))
    if answer is best:
        over = {what: s for what, s in own.items() if not what.startswith("ideal")}
        what = max(over, key=over.__getitem__)
        return f"the best that fits; most of what it loses to the ideal: {what}, {over[what]:.3g} s"
    other = dict(waterfall(best))
    worse = {what: own.get(what, 0.0) - other.get(what, 0.0) for what in {*own, *other}}
    what = max(sorted(worse), key=worse.__getitem__)
    slower = answer.price.step / best.price.step - 1.0
    if slower < 5e-4:
        more = (answer.verdict.memory.total - best.verdict.memory.total) / GIB
        return f"as fast, with {more:.3g} GiB more" if more > 0.0 else "as fast"
    if worse[what] <= 0.0:
        return f"{100 * slower:.1f} % slower"
    return f"{100 * slower:.1f} % slower, most of it {what}: {worse[what]:.3g} s more"


def bound(answer: Answer) -> str:
    """What takes most of the time beyond the arithmetic itself."""
    over = [(seconds, what) for what, seconds in waterfall(answer) if not what.startswith("ideal")]
    return max(over)[1]


def as_json(found: Found) -> Mapping[str, Any]:
    """The object of the contract."""
    best = found.best
    return {
        "searched": found.searched,
        "feasible": found.feasible,
        "seconds": found.seconds,
        "plans": [
            {
                "plan": str(answer.question.plan),
                "micro_batch": answer.question.micro_batch,
                "step_s": answer.price.step,
                "error_pct": 100.0 * answer.trust.error,
                "mem_gib": answer.verdict.memory.total / GIB,
                "mfu": answer.mfu,
                "bubble": answer.bubble,
                "exposed_comm_s": sum(traffic.exposed for traffic in answer.price.comm.values()),
                "bound": bound(answer),
                "why": why(answer, best[0]),
            }
            for answer in best
        ],
    }


def as_text(found: Found) -> str:
    """The same for people."""
    ask = found.best[0].question
    lines = [
        f"cluster    {ask.cluster.name}: {ask.cluster.devices} {ask.cluster.device.name}",
        f"stack      {ask.stack.name}: a step is right within about {100 * found.best[0].trust.error:.0f} % on average",
        f"searched   {found.searched} plans in {found.seconds:.2f} s; {found.feasible} fit",
    ]
    for place, answer in enumerate(found.best, 1):
        lines += [
            "",
            f"{place}. {answer.question.plan}   (micro_batch {answer.question.micro_batch})",
            f"   {answer.price.step:.4g} s a step, MFU {100 * answer.mfu:.1f} %, bubble {100 * answer.bubble:.1f} %,"
            f" {answer.verdict.memory.total / GIB:.3g} of {answer.verdict.capacity / GIB:.3g} GiB",
            f"   {why(answer, found.best[0])}",
        ]
    return "\n".join(lines)
