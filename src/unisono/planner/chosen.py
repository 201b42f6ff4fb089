"""What `plan` says of what it has found: why the first is best, where the next ones lose, what else is possible."""

from collections.abc import Mapping
from typing import Any

from unisono.planner import stages, ties
from unisono.planner.search import Ranking
from unisono.planner.simulate import GIB, Answer, bound, precision_lines, waterfall


def why(answer: Answer, best: Answer) -> str:
    """One sentence: what binds the best plan, or where another loses most against it."""
    own = dict(waterfall(answer))
    if answer is best:
        over = {what: s for what, s in own.items() if not what.startswith("ideal")}
        what = max(over, key=over.__getitem__)
        return f"the best that fits; most of what it loses to the ideal: {what}, {over[what]:.3g} s"
    if answer.price.step < best.price.step and ties.meetings(answer.question) > ties.meetings(best.question):
        return _nearly(answer, best)
    more = (answer.verdict.memory.total - best.verdict.memory.total) / GIB
    return against(own, dict(waterfall(best)), answer.price.step / best.price.step - 1.0, more)


def _nearly(answer: Answer, best: Answer) -> str:
    """Why a plan with a lower price is not the best one."""
    own, other = (ties.meetings(one.question) for one in (answer, best))
    return (
        f"{100 * (1.0 - answer.price.step / best.price.step):.1f} % quicker by its price, which says nothing below"
        f" {100 * ties.margin(best.question):.1f} %; a rank of it waits for others {own:.0f} times a step,"
        f" not {other:.0f}"
    )


def against(own: Mapping[str, float], other: Mapping[str, float], slower: float, more: float) -> str:
    """Where a plan loses most against another, both by the parts of their steps. more: GiB."""
    worse = {what: own.get(what, 0.0) - other.get(what, 0.0) for what in {*own, *other}}
    what = max(sorted(worse), key=worse.__getitem__)
    if slower < 5e-4:
        return f"as fast, with {more:.3g} GiB more" if more > 0.0 else "as fast"
    if worse[what] <= 0.0:
        return f"{100 * slower:.1f} % slower"
    return f"{100 * slower:.1f} % slower, most of it {what}: {worse[what]:.3g} s more"


def device_seconds(answer: Answer) -> float:
    """Of one step."""
    return answer.price.step * answer.question.plan.world


def cost(answer: Answer) -> float | None:
    """Of one step, in the currency of the cluster's price; None where nobody has said."""
    hourly = answer.question.cluster.cost_per_hour
    return None if hourly is None else device_seconds(answer) / 3600.0 * hourly


def as_json(found: Ranking) -> Mapping[str, Any]:
    """The object of the contract, and what else is known."""
    best, counts = found.best, found.counts
    return {
        "searched": counts.searched,
        "feasible": counts.feasible,
        "seconds": found.seconds,
        "priced": counts.priced,
        "pruned": {"memory": counts.too_large, "dominated": counts.dominated},
        "played": counts.played,
        "plans": [
            {
                "plan": str(answer.question.plan),
                "micro_batch": answer.question.micro_batch,
                "step_s": answer.price.step,
                "error_pct": answer.error_pct,
                "mem_gib": answer.verdict.memory.total / GIB,
                "mfu": answer.mfu,
                "bubble": answer.bubble,
                "exposed_comm_s": sum(traffic.exposed for traffic in answer.price.comm.values()),
                "layers_again": max(one.selective + one.full for one in answer.stages),
                "stages": stages.as_json(answer.stages),
                "bound": bound(answer),
                "why": why(answer, best[0]),
            }
            for answer in best
        ],
        "pareto": [
            {
                "plan": str(answer.question.plan),
                "micro_batch": answer.question.micro_batch,
                "step_s": answer.price.step,
                "mem_gib": answer.verdict.memory.total / GIB,
                "devices": answer.question.plan.world,
                "device_s": device_seconds(answer),
                "cost": cost(answer),
            }
            for answer in found.front
        ],
    }


def as_text(found: Ranking, more: str = "") -> str:
    """The same for people. more: a sentence about the best plan."""
    ask, counts = found.best[0].question, found.counts
    lines = [
        f"cluster    {ask.cluster.name}: {ask.cluster.devices} {ask.cluster.device.name}",
        *precision_lines(ask.plan, ask.cluster.device),
        f"stack      {ask.stack.name}: {found.best[0].trusted}",
        f"searched   {counts.searched:,} plans in {found.seconds:.2f} s; {counts.feasible:,} fit",
    ]
    if counts.priced < counts.searched:
        lines.append(
            f"           {counts.priced:,} priced; {counts.too_large:,} whose weights and optimiser alone are too"
            f" large, {counts.dominated:,} that cannot be quicker or smaller than one found"
        )
    for place, answer in enumerate(found.best, 1):
        lines += [
            "",
            f"{place}. {answer.question.plan}   (micro_batch {answer.question.micro_batch})",
            f"   {answer.price.step:.4g} s a step, MFU {100 * answer.mfu:.1f} %, bubble {100 * answer.bubble:.1f} %,"
            f" {answer.verdict.memory.total / GIB:.3g} of {answer.verdict.capacity / GIB:.3g} GiB",
            f"   {why(answer, found.best[0])}",
        ]
        if answer.question.plan.recompute == "auto":
            lines.insert(-1, f"   recompute=auto: {stages.sentence(answer.question.plan, answer.stages)}")
        if more and place == 1:
            lines.append(f"   {more}")
    if len(found.front) > 1:
        sizes = len({answer.question.plan.world for answer in found.front}) > 1
        last = "slower, larger and dearer" if sizes else "slower and larger"
        lines += ["", f"less memory for more time: none of these is {last} than another"]
        lines += [_line(answer, sizes) for answer in _few(found.front, 8 if sizes else 6)]
    return "\n".join(lines)


def _line(answer: Answer, sizes: bool) -> str:
    spent = cost(answer)
    paid = f"  {spent:>8.3g} a step" if spent is not None else ""
    if sizes:
        paid += f"  {answer.question.plan.world:>6} devices, {device_seconds(answer):,.0f} device-seconds"
    return (
        f"  {answer.price.step:>9.4g} s  {answer.verdict.memory.total / GIB:>6.1f} GiB{paid}"
        f"  {answer.question.plan}   (micro_batch {answer.question.micro_batch})"
    )


def _few(front: tuple[Answer, ...], count: int) -> list[Answer]:
    """The front's ends and some between."""
    if len(front) <= count:
        return list(front)
    return [front[round(i * (len(front) - 1) / (count - 1))] for i in range(count)]
