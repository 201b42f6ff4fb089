"""Where the model is better cut into stages: the cut whose dearest stage is cheapest of all whose stages fit."""

from dataclasses import replace

from unisono.planner.cuts import cut_of, is_cuttable
from unisono.planner.formatting import Description, lines, share
from unisono.planner.model_kinds import attending
from unisono.planner.pricing import verdict
from unisono.planner.simulate import PlanRequest, PlanResult, gain, simulate
from unisono.planner.timetables import name_of
from unisono.spec.words import seconds
from unisono_contrib.planner.heterogeneous import cut

_WORTH = 1e-3  # of a step: less than that is not said


def better(answer: PlanResult) -> PlanResult | None:
    """Under a cut that is quicker, or that fits where the plan's own does not; None where there is none."""
    other = best(answer.request)
    if other is None:
        return None
    result = simulate(other)
    return result if not answer.verdict.fits or gain(result, answer) >= _WORTH else None


def best(ask: PlanRequest) -> PlanRequest | None:
    """The request with its best cut; None where no cut fits, or where rows have several stages."""
    plan = ask.plan
    if attending(ask.model) is None or plan.pp == 1 or not is_cuttable(plan.schedule):
        return None
    free = replace(plan, schedule=name_of(plan.schedule))
    other = replace(ask, plan=cut(replace(ask, plan=free)))
    return other if verdict(other).fits else None


def sentence(better: PlanResult, answer: PlanResult) -> str:
    """The cut, and what it is good for."""
    plan, step = f"schedule={better.request.plan.schedule}", f"{seconds(better.price.step)} a step"
    return (
        f"{plan} would be {share(gain(better, answer))} quicker: {step}"
        if answer.verdict.fits
        else f"{plan} fits: {step}"
    )


def describe(better: PlanResult | None, answer: PlanResult) -> Description:
    """The key `better_cut`, and a line of the page."""
    if better is None:
        return {"better_cut": None}, ""
    plan = better.request.plan
    facts = {
        "blocks": list(cut_of(plan.schedule)), "plan": str(plan), "gain": gain(better, answer),
        "step_s": better.price.step,
    }  # fmt: skip
    return {"better_cut": facts}, lines([("cut", sentence(better, answer))])[0]
