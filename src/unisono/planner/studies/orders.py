"""Which axis should lie inside a node and which across: a plan priced under every order of its axes that differs here.

Another order is another numbering of the ranks, which `launch.order` plays. Nothing is computed differently, and memory
stays; but groups cross other levels of the network.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from unisono.plan import Plan
from unisono.plan.grammar import meant
from unisono.planner.formatting import Column, Description, figure, figures, lines, more_than, share, table
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import USUAL, Order, evenly, of_many, stride
from unisono.planner.price_parts import Price
from unisono.planner.simulate import PlanRequest, PlanResult, closed, gain, simulate
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


def under(ask: PlanRequest, order: Order) -> PlanRequest:
    """The same request with the axes in that order. Raises UsageError where it has no price."""
    if not evenly(ask.plan, order):
        raise UsageError(
            f"--order: ep={ask.plan.ep} reaches over several axes, which then do not lie side by side",
            where="--order, plan.ep", fix="tp, cp and shard one after the other", code="C04",
        )  # fmt: skip
    return replace(ask, cluster=replace(ask.cluster, order=order))


def distinct(ask: PlanRequest) -> list[tuple[PlanRequest, Price]]:
    """The request in all orders that differ by closed forms, with what these say, the usual one first. Others than
    that are left out where groups would lie unevenly over a level, since prices count as if all lay like the first.
    Raises UsageError where orders mean nothing."""
    plan, usual = ask.plan, under(ask, USUAL)
    axes = of_many(plan, USUAL)
    alone = tuple(axis for axis in USUAL if axis not in axes)
    requests = [(usual, closed(usual))]
    for permuted in permutations(axes):
        order = (*permuted, *alone)
        if permuted == axes or not evenly(plan, order) or any(uneven(plan, ask.cluster, order)):
            continue
        other = under(ask, order)
        price = closed(other)
        if all(price != seen for _, seen in requests):
            requests.append((other, price))
    return requests


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


def compared(ask: PlanRequest) -> list[PlanResult]:
    """The plan under every order that differs, the usual one first. Raises UsageError where orders mean nothing."""
    return [simulate(request) for request, _ in distinct(ask)]


def best(every: Sequence[PlanResult]) -> PlanResult:
    """The quickest; the usual order, which is the first, where none is quicker than that by a hundredth."""
    first = min(every, key=lambda answer: answer.price.step)
    return first if gain(first, every[0]) >= WORTH else every[0]


def quicker(
    best: PlanResult, every: Sequence[tuple[PlanResult, Sequence[tuple[PlanRequest, Price]]]]
) -> PlanResult | None:
    """Of some plans, each with its orders that differ, the best under another order than the usual one, where that
    beats `best` by a hundredth. What closed forms promise most of is played."""
    promised: list[tuple[float, int, PlanRequest]] = []
    for usual, ((_, alone), *others) in every:
        for ask, price in others:
            promised.append((usual.price.step + price.step - alone.step, len(promised), ask))
    answers = [
        simulate(ask) for step, _, ask in sorted(promised)[:_TRIED] if 1.0 - step / best.price.step >= WORTH
    ]
    fitting = [answer for answer in answers if answer.verdict.fits and gain(answer, best) >= WORTH]
    return min(fitting, key=lambda answer: answer.price.step, default=None)


# --- as told ---------------------------------------------------------------------------------------------------------


def describe(answer: PlanResult, every: Sequence[PlanResult] = ()) -> Description:
    """How a plan's axes lie on the cluster's levels; and under every other order, where they were asked for."""
    plan, cluster = answer.request.plan, answer.request.cluster
    axes, levels = of_many(plan, cluster.order), dict[str, Any]()
    played = "" if axes == of_many(plan, USUAL) else f"; --launch.order {','.join(axes)} plays it"
    said = [("order", f"{', '.join(axes) or 'one rank'}: the innermost first{played}")]
    for axis in (*axes, *(("ep",) if plan.ep > 1 else ())):
        ranks, apart = getattr(plan, axis), stride(plan, axis, cluster.order)
        ways = zip(cluster.links, cluster.levels(apart, ranks), strict=True)
        split = {link.name: count for link, count in ways if count > 1}
        levels[axis] = {"ranks": ranks, "apart": apart, "ways": split}
        over = " x ".join(f"{count} over {level}" for level, count in split.items())
        said.append(("", f"{axis}: {ranks} ranks, {apart} apart: {over}"))
    crossed = list(uneven(plan, cluster, cluster.order))
    said += [
        ("", f"groups of {axis} lie unevenly over {level}: some cross more than is priced")
        for axis, level in crossed
    ]
    rows = [_row(other, every[0]) for other in sorted(every, key=lambda other: other.price.step)]
    facts = {
        "axes": list(axes), "levels": levels, "uneven": [{"axis": axis, "level": level} for axis, level in crossed],
        "orders": rows or None,
    }  # fmt: skip
    if rows:
        quick = f"none is quicker than the usual one by {100 * WORTH:.0f} % or more"
        if (first := best(every)) is not every[0]:
            order = ", ".join(of_many(plan, first.request.cluster.order))
            quick = f"{order} is {share(gain(first, every[0]))} quicker than the usual one"
        said.append(("orders", f"{len(rows)} differ here; {quick}"))
    text = lines(said) + (table(_COLUMNS, rows[:_SHOWN]) if len(rows) > 1 else [])
    return {"order": facts}, "\n".join(text)


def _row(answer: PlanResult, usual: PlanResult) -> dict[str, Any]:
    more = {what: s for what, s in more_than(answer, usual).items() if abs(s) >= 1e-3 * usual.price.step}
    axes = of_many(answer.request.plan, answer.request.cluster.order)
    return {"axes": list(axes), "step_s": answer.price.step, "gain": gain(answer, usual), "more_s": more}


def _parts(more: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {seconds:+.3g} s" for what, seconds in list(more.items())[:3])


_COLUMNS = (
    Column("order", "axes", ",".join), Column("step s", "step_s", figure), Column("saves", "gain", share),
    Column("what is more or less than in the usual order", "more_s", _parts),
)  # fmt: skip
_SHOWN = 5


def describe_best(answers: Sequence[PlanResult]) -> Description:
    """For `plan`, of its best plans and what is quicker than the first in another order: the key `order`, and a
    sentence, "" where orders cannot differ."""
    every = [(answer, distinct(answer.request)) for answer in answers]
    better = quicker(answers[0], every)
    if better is None:
        alike = all(len(orders) == 1 for _, orders in every)
        said = "" if alike else f"no other order of the axes is quicker by {100 * WORTH:.0f} % or more"
        return {"order": {"quicker": None}}, said
    number = next(
        place for place, answer in enumerate(answers, 1) if answer.request.plan == better.request.plan
    )
    which = "it" if number == 1 else f"plan {number}"
    row = {**figures(better), **_row(better, answers[0])}
    return {"order": {"quicker": row}}, (
        f"with --launch.order {','.join(row['axes'])} (innermost first) {which} would be"
        f" {share(gain(better, answers[0]))} quicker: {better.price.step:.4g} s a step"
    )
