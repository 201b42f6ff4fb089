"""Why a plan is the best, and where others lose against it: sentences and rows of `plan` and `plan=auto`."""

from unisono.planner import error_bars, formatting, tie_breaks
from unisono.planner.formatting import Column, Description, Row, bound, more_than
from unisono.planner.memory import MARGIN
from unisono.planner.search import Ranking
from unisono.planner.simulate import PlanResult
from unisono.spec.words import nbytes, seconds

_FRONT = (
    Column("s a step", "step_s", formatting.figure), Column("memory", "mem_gib", formatting.gibibytes),
    Column("cost of a step", "cost", formatting.figure), Column("devices", "devices"),
    Column("device-seconds", "device_s", formatting.many),
    Column("micro_batch", "micro_batch"), Column("plan", "plan"),
)  # fmt: skip
_SHOWN = 8  # of the front


def why(answer: PlanResult, best: PlanResult) -> str:
    """One sentence: what binds the best plan, or where another loses most against it."""
    if answer is best:
        lost, parts = bound(answer), formatting.losses(answer)
        return (
            f"the best that fits; beside the model's arithmetic most goes to: {lost}, {seconds(parts[lost])}"
        )
    slower = answer.price.step / best.price.step - 1.0
    risk, other = (tie_breaks.unsure(candidate.request) for candidate in (answer, best))
    if slower < -5e-4 and risk > other:
        untried = ", ".join(error_bars.untried(answer.request.plan, answer.request.stack))
        sure = formatting.share(risk)
        return f"bolder: might gain {formatting.share(-slower)}, within an error of {sure}; unmeasured: {untried}"
    if slower < 5e-4:
        more = answer.verdict.memory.total - best.verdict.memory.total
        return f"as fast, with {nbytes(more)} more" if more > 0.0 else "as fast"
    more_s = more_than(answer, best)
    what = max(more_s, key=more_s.__getitem__)
    reason = f", most of it {what}: {seconds(more_s[what])} more" if more_s[what] > 0.0 else ""
    return f"{formatting.share(slower)} slower{reason}"


def describe(ranking: Ranking, *more: str) -> Description:
    """The object of the contract; and for people. more: lines about the best plan."""
    best, counts = ranking.best, ranking.counts
    front = [_point(answer) for answer in ranking.front]
    facts = {
        "searched": counts.searched,
        "feasible": counts.feasible,
        "seconds": ranking.seconds,
        "priced": counts.priced,
        "pruned": {"memory": counts.too_large, "dominated": counts.dominated},
        "played": counts.played,
        "plans": [_plan(answer, best[0]) for answer in best],
        "pareto": front,
    }
    if not best:
        return facts, ""
    head = [
        *formatting.summary(best[0]),
        (
            "searched",
            f"{counts.searched:,} plans in {ranking.seconds:.2f} s; {counts.feasible:,} fit with"
            f" {formatting.share(MARGIN)} of their memory to spare, as allocators differ by that",
        ),
    ]
    if counts.priced < counts.searched:
        skipped = {
            "weights and optimiser alone do not fit": counts.too_large,
            "a plan found before is quicker and smaller": counts.dominated,
        }
        said = "; ".join(f"{many:,} skipped because {reason}" for reason, many in skipped.items() if many)
        head.append(("", f"{counts.priced:,} priced; {said}"))
    text = formatting.lines(head)
    for place, answer in enumerate(best, 1):
        text += ["", f"{place}. {answer.request.plan}   (micro_batch {answer.request.micro_batch})"]
        text += [
            f"   {line}" for line in (*_about(answer), why(answer, best[0]), *(more if place == 1 else ()))
        ]
    if len(front) > 1:
        few = (
            [front[round(i * (len(front) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]
            if len(front) > _SHOWN
            else front
        )
        alike = len({row["devices"] for row in front}) == 1
        hidden = {"devices", "device_s"} if alike else set[str]()
        hidden |= {"cost"} if front[0]["cost"] is None else set[str]()
        head = "less memory for more time: no plan is both faster and smaller than one of these"
        part = f" ({len(few)} of {len(front)}, which --json has)" if len(few) < len(front) else ""
        text += ["", f"{head}{part}"]
        text += formatting.table([column for column in _FRONT if column.key not in hidden], few)
    return facts, "\n".join(text)


def _about(answer: PlanResult) -> list[str]:
    verdict = answer.verdict
    said = [
        f"{nbytes(verdict.memory.total)} of {nbytes(verdict.capacity)}, {seconds(answer.price.step)} a step,"
        f" {formatting.rate(answer)}, MFU {formatting.share(answer.mfu)}, bubble {formatting.share(answer.bubble)}"
    ]
    return said + [text for name, text in formatting.shared_out(answer) if name == "recompute"]


def _plan(answer: PlanResult, best: PlanResult) -> Row:
    return {**formatting.figures(answer), "stages": formatting.stages(answer), "why": why(answer, best)}


def _point(answer: PlanResult) -> Row:
    ask = answer.request
    spent, hourly = answer.price.step * ask.plan.world, ask.cluster.cost_per_hour
    cost = None if hourly is None else spent / 3600.0 * hourly
    return {**formatting.figures(answer), "devices": ask.plan.world, "device_s": spent, "cost": cost}
