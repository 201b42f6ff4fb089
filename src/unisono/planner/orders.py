"""Which axis should lie inside a node and which across: a plan priced under every order of its axes that differs here.

Another order is another numbering of the ranks. Nothing is computed differently, and memory stays; but groups cross
other levels of the network.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import factorial

from unisono.plan import Plan
from unisono.plan.grammar import meant
from unisono.planner.collectives import bus, exchange, message
from unisono.planner.collectives import levels as levels_of
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import USUAL, Order, evenly, of_many, stride
from unisono.planner.priced import price, shares_cores
from unisono.planner.simulate import Answer, Question, gain, simulate, waterfall
from unisono.spec.errors import UsageError

BEST = "best"
# Share of a step below which no other order is told of: a small part of any price's error. No price depends on it.
WORTH = 0.01
_TRIED = 3  # orders that closed forms call quicker and that are played to see


def read(text: str) -> Order:
    """The order that the names of some axes begin, the innermost first; the others follow as usual. For `best`, which
    is found later, the usual one. Raises UsageError.
    """
    if text == BEST:
        return USUAL
    names = tuple(name.strip() for name in text.split(","))
    fix = f"names out of {' '.join(USUAL)}, the innermost first; or {BEST}"
    for place, name in enumerate(names):
        if name == "ep":
            what = "ep has no place of its own: it re-uses the ranks of tp, cp and shard"
        elif name not in USUAL:
            what = f"no axis is called {name!r}{meant(name, USUAL)}"
        elif name in names[:place]:
            what = f"{name} is named twice"
        else:
            continue
        raise UsageError(f"--order {text}: {what}", where="--order", fix=fix, code="C04")
    return (*names, *(axis for axis in USUAL if axis not in names))


def under(ask: Question, order: Order) -> Question:
    """The same question with the axes in that order. Raises UsageError where it has no price."""
    refuse(ask)
    if not evenly(ask.plan, order):
        raise UsageError(
            f"--order: ep={ask.plan.ep} reaches over several axes, which then do not lie side by side",
            where="--order, plan.ep", fix="tp, cp and shard one after the other", code="C04",
        )  # fmt: skip
    return replace(ask, cluster=replace(ask.cluster, order=order))


def refuse(ask: Question) -> None:
    """Raises UsageError where orders mean nothing."""
    if shares_cores(ask.model, ask.cluster):
        raise UsageError(
            f"--order: {ask.cluster.name} is hosts whose ranks share cores, measured in the usual order alone",
            where="--order, --cluster", fix="a cluster of devices, for example dgx-a100:16", code="C04",
        )  # fmt: skip


def named(plan: Plan, order: Order) -> str:
    return ", ".join(of_many(plan, order)) or "one rank"


def distinct(plan: Plan, cluster: Cluster) -> tuple[Order, ...]:
    """One of all orders that cross the same levels in the same ways, the usual one first. Others than that are left out
    where groups would lie unevenly over a level, since prices count as if all lay like the first."""
    own = of_many(plan, USUAL)
    alone = tuple(axis for axis in USUAL if axis not in own)
    found = {_crossed(plan, cluster, USUAL): USUAL}
    for some in permutations(own):
        order = (*some, *alone)
        if some != own and evenly(plan, order) and not any(uneven(plan, cluster, order)):
            found.setdefault(_crossed(plan, cluster, order), order)
    return tuple(found.values())


def as_usual(plan: Plan, cluster: Cluster) -> bool:
    """Whether the cluster's order crosses the same levels in the same ways as the usual one."""
    return _crossed(plan, cluster, cluster.order) == _crossed(plan, cluster, USUAL)


def _crossed(plan: Plan, cluster: Cluster, order: Order) -> tuple[object, ...]:
    """All that a price can read of an order."""
    groups = [(stride(plan, axis, order), getattr(plan, axis)) for axis in ("tp", "cp", "shard", "dp", "ep")]
    if plan.ep > 1:  # ranks that hold the same experts are the outer ones of shard
        every, size = groups[2]
        groups += [(every * size // some, some) for some in range(2, size) if size % some == 0]
    found: list[object] = [
        what
        for group in groups
        for what in (bus(cluster, *group), levels_of(cluster, *group), exchange(cluster, *group))
    ]
    apart = stride(plan, "pp", order)
    # To the next stage, along all of them, and from the first to the last; latency and bandwidth of each.
    for far, ranks in ((apart, 2), (apart, plan.pp), (apart * (plan.pp - 1), 2)):
        found += [message(cluster, far, moved, 1.0, ranks) for moved in (0.0, 1.0)] if plan.pp > 1 else []
    return tuple(found)


def uneven(plan: Plan, cluster: Cluster, order: Order) -> Iterator[tuple[str, str]]:
    """(axis, level) where groups of an axis lie in several ways over the blocks of a level."""
    for link in cluster.links:
        for axis in of_many(plan, order):
            apart, size = stride(plan, axis, order), getattr(plan, axis)
            inside = link.size % (apart * size) == 0
            across = apart % link.size == 0
            split = link.size % apart == 0 and size % (link.size // apart) == 0
            if link.size < plan.world and not (inside or across or split):
                yield axis, link.name


# --- all orders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparedOrders:
    """answers: under each order that differs, the quickest first. usual: under the usual one. many: all orders."""

    answers: tuple[Answer, ...]
    usual: Answer
    many: int

    @property
    def best(self) -> Answer:
        """The quickest; the usual one where none is quicker than that by a hundredth."""
        first = self.answers[0]
        return first if gain(first, self.usual) >= WORTH else self.usual


def compared(ask: Question) -> ComparedOrders:
    """The plan under every order that differs. Raises UsageError where orders mean nothing."""
    refuse(ask)
    orders = distinct(ask.plan, ask.cluster)
    answers = [simulate(under(ask, order)) for order in orders]
    many = factorial(len(of_many(ask.plan, USUAL)))
    return ComparedOrders(tuple(sorted(answers, key=lambda one: one.price.step)), answers[0], many)


def differences(answer: Answer, usual: Answer) -> list[tuple[str, float]]:
    """(axis or other part of a step, seconds more) of what is no thousandth of the step, the greatest first."""
    own, other = dict(waterfall(answer)), dict(waterfall(usual))
    more = {what: own.get(what, 0.0) - other.get(what, 0.0) for what in [*other, *own]}
    told = [(what.removeprefix("exposed on "), seconds) for what, seconds in more.items()]
    return sorted(
        (one for one in told if abs(one[1]) >= 1e-3 * usual.price.step), key=lambda one: -abs(one[1])
    )


def quicker(answers: Sequence[Answer]) -> Answer | None:
    """The best of some plans under another order, where that beats the first of them by a hundredth. All orders are
    looked at by closed forms, what these promise most of is played."""
    promised: list[tuple[float, int, Question]] = []
    for usual in answers:
        if not matters(usual):
            continue
        ask = usual.question
        alone = _closed(ask)
        for order in distinct(ask.plan, ask.cluster)[1:]:
            other = under(ask, order)
            promised.append((usual.price.step + _closed(other) - alone, len(promised), other))
    found = [
        simulate(ask)
        for step, _, ask in sorted(promised)[:_TRIED]
        if 1.0 - step / answers[0].price.step >= WORTH
    ]
    fitting = [one for one in found if one.verdict.fits and gain(one, answers[0]) >= WORTH]
    return min(fitting, key=lambda one: one.price.step, default=None)


def _closed(ask: Question) -> float:
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    return price(ask.model, ask.plan, ask.cluster, ask.stack, **sizes).step


def matters(answer: Answer) -> bool:
    """Whether a plan's axes can lie in ways that differ on its cluster."""
    ask = answer.question
    return not shares_cores(ask.model, ask.cluster) and len(distinct(ask.plan, ask.cluster)) > 1


def levels(plan: Plan, cluster: Cluster, axis: str) -> list[tuple[str, int]]:
    """(level, ways in which an axis splits there), the innermost first."""
    size = getattr(plan, axis)
    ways = cluster.levels(stride(plan, axis, cluster.order), size)
    return [(link.name, some) for link, some in zip(cluster.links, ways, strict=True) if some > 1]
