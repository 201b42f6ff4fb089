"""What `simulate` and `plan` say of the order of axes: where each lies, which order is quicker and why, what trains."""

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import USUAL, of_many, rank_at, stride, trains
from unisono.planner.orders import (
    WORTH,
    ComparedOrders,
    as_usual,
    differences,
    levels,
    matters,
    named,
    uneven,
)
from unisono.planner.simulate import Answer, gain

_SHOWN = 5  # orders; and parts of a step in which they differ
_PARTS = 3


def as_json(answer: Answer, all_of: ComparedOrders | None = None) -> Mapping[str, Any]:
    """The order of a price; and every other, where they were asked for."""
    plan, where = answer.question.plan, answer.question.cluster
    found: dict[str, Any] = {
        "axes": list(of_many(plan, where.order)),
        "trains": trains(plan, where.order),
        "as_usual": as_usual(plan, where),
        "levels": {
            axis: {
                "ranks": getattr(plan, axis),
                "apart": stride(plan, axis, where.order),
                "ways": dict(levels(plan, where, axis)),
            }
            for axis in _told(plan, where)
        },
        "uneven": [{"axis": axis, "level": level} for axis, level in uneven(plan, where, where.order)],
        "first_node": _first_node(plan, where),
    }
    if all_of is not None:
        found["orders"] = [_row(one, all_of) for one in all_of.answers]
    return {"order": found}


def _row(one: Answer, all_of: ComparedOrders) -> dict[str, Any]:
    return {
        "axes": list(of_many(one.question.plan, one.question.cluster.order)),
        "trains": one is all_of.usual,
        "step_s": one.price.step,
        "gain": gain(one, all_of.usual),
        "more_s": dict(differences(one, all_of.usual)),
        "exposed_s": {axis: traffic.exposed for axis, traffic in one.price.comm.items()},
    }


def as_text(answer: Answer, all_of: ComparedOrders | None = None) -> str:
    """The same for people."""
    plan, where = answer.question.plan, answer.question.cluster
    told = [
        f"{named(plan, where.order)}: the innermost first"
        if len(_told(plan, where)) > 1
        else "one axis alone"
    ]
    told[0] += "; the usual order, which train plays" if trains(plan, where.order) else ""
    for axis in _told(plan, where):
        ways = " x ".join(f"{some} over {level}" for level, some in levels(plan, where, axis))
        told.append(
            f"{axis:<6}{getattr(plan, axis):>5} ranks, {stride(plan, axis, where.order)} apart: {ways}"
        )
    for axis, level in uneven(plan, where, where.order):
        told.append(f"groups of {axis} lie unevenly over {level}: some cross more than is priced")
    if not trains(plan, where.order):
        told += _not_played(plan, where)
    lines = [f"{'order' if not place else '':<11}{line}" for place, line in enumerate(told)]
    if all_of is not None:
        lines += ["", *_table(all_of)]
    return "\n".join(lines)


def _told(plan: Plan, where: Cluster) -> tuple[str, ...]:
    return (*of_many(plan, where.order), *(("ep",) if plan.ep > 1 else ()))


def _first_node(plan: Plan, where: Cluster) -> list[int]:
    return sorted(rank_at(plan, place, where.order) for place in range(min(where.node, plan.world)))


def _not_played(plan: Plan, where: Cluster) -> list[str]:
    """What one can do today."""
    usual = named(plan, USUAL)
    if as_usual(plan, where):
        return [f"it crosses what the usual order, {usual}, crosses: train plays that one, at the same price"]
    first = _first_node(plan, where)
    ranks = " ".join(str(rank) for rank in first[:_SHOWN]) + (" ..." if len(first) > _SHOWN else "")
    return [
        f"train plays {usual} alone, and no key or flag of it gives another; only a launcher that places",
        f"single ranks could: ranks {ranks} on the first node. Nobody has tried that yet",
    ]


def _table(all_of: ComparedOrders) -> list[str]:
    plan = all_of.usual.question.plan
    few = list(all_of.answers[:_SHOWN])
    few += [all_of.usual] if all_of.usual not in few else []
    width = max(len(named(plan, one.question.cluster.order)) for one in few) + 2
    lines = [
        f"of {all_of.many} orders of {named(plan, USUAL)}, {len(all_of.answers)} differ here"
        if len(all_of.answers) > 1
        else f"all orders of {named(plan, USUAL)} cost the same here",
    ]
    if len(few) > 1:
        lines.append(
            f"{'step s':>9}{'slower':>9}  {'order':<{width}}what is more or less than in the usual order"
        )
    for one in few if len(few) > 1 else []:
        said = "the usual order, which train plays" if one is all_of.usual else parts(one, all_of.usual)
        slower = f"{100 * (one.price.step / all_of.usual.price.step - 1.0):+.1f} %"
        order = named(plan, one.question.cluster.order)
        lines.append(f"{one.price.step:>9.4g}{slower:>9}  {order:<{width}}{said}".rstrip())
    lines.append(verdict(all_of))
    return [f"{'orders' if not place else '':<11}{line}" for place, line in enumerate(lines)]


def parts(one: Answer, usual: Answer) -> str:
    """Where an order's step differs most from the usual one's."""
    more = differences(one, usual)[:_PARTS]
    return ", ".join(f"{what} {seconds:+.3g} s" for what, seconds in more) or "nothing that counts"


def verdict(all_of: ComparedOrders) -> str:
    best, plan = all_of.best, all_of.usual.question.plan
    if best is all_of.usual:
        return f"no order is quicker than the usual one by {100 * WORTH:.0f} % or more"
    order = named(plan, best.question.cluster.order)
    return f"{order} is {100 * gain(best, all_of.usual):.1f} % quicker than the usual order; train does not play it"


def of_plans(answers: Sequence[Answer], found: Answer | None) -> str:
    """One sentence for `plan`, of its best plans and what is quicker than the first in another order; "" where orders
    cannot differ."""
    if found is None:
        alike = not any(matters(one) for one in answers)
        return "" if alike else f"no other order of the axes is quicker by {100 * WORTH:.0f} % or more"
    ask, first = found.question, answers[0]
    own = next(place for place, one in enumerate(answers, 1) if one.question.plan == ask.plan)
    which = "" if own == 1 else f"plan {own} "
    return (
        f"with the axes in the order {named(ask.plan, ask.cluster.order)} (innermost first) {which}would be"
        f" {100 * gain(found, first):.1f} % quicker, {found.price.step:.4g} s a step; train plays"
        f" {named(ask.plan, USUAL)} alone"
    )


def of_plans_json(answers: Sequence[Answer], found: Answer | None) -> Mapping[str, Any]:
    """quicker: the best plan in another order, None where the usual order is as good."""
    if found is None:
        return {"order": {"quicker": None}}
    ask = found.question
    return {
        "order": {
            "quicker": {
                "plan": str(ask.plan),
                "micro_batch": ask.micro_batch,
                "axes": list(of_many(ask.plan, ask.cluster.order)),
                "step_s": found.price.step,
                "gain": gain(found, answers[0]),
                "trains": False,
            }
        }
    }
