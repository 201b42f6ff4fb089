"""Where the model is better cut into stages: the cut whose dearest stage is cheapest of all whose stages fit."""

from dataclasses import dataclass, replace

from unisono.planner.cuts import given, is_cuttable
from unisono.planner.priced import shares_cores
from unisono.planner.simulate import Answer, Question, gain, simulate, verdict_of
from unisono.planner.tell import Told, lines, share
from unisono.planner.timetables import name_of
from unisono.planner.unlike import cut
from unisono.planner.work.transformer import Transformer
from unisono.spec.words import seconds

_WORTH = 1e-3  # of a step: less than that is not said


@dataclass(frozen=True, slots=True)
class Better:
    """Another cut: blocks by stage, and its answer. gain: share of the step that it saves."""

    blocks: tuple[int, ...]
    answer: Answer
    gain: float

    def sentence(self, fits: bool) -> str:
        """fits: the plan's own cut does, too."""
        plan = f"schedule={self.answer.question.plan.schedule}"
        step = f"{seconds(self.answer.price.step)} a step"
        return f"{plan} would be {share(self.gain)} quicker: {step}" if fits else f"{plan} fits: {step}"


def better(answer: Answer) -> Better | None:
    """A cut that is quicker, or that fits where the plan's own does not; None where there is none."""
    other = best(answer.question)
    if other is None:
        return None
    found = simulate(other)
    saved = gain(found, answer)
    helps = not answer.verdict.fits or saved >= _WORTH
    return Better(given(other.plan.schedule), found, saved) if helps else None


def best(ask: Question) -> Question | None:
    """The question with its best cut; None where no cut fits, or where rows have several stages."""
    model, plan = ask.model, ask.plan
    if not isinstance(model, Transformer) or shares_cores(model, ask.cluster):
        return None
    if plan.pp == 1 or not is_cuttable(plan.schedule):
        return None
    free = replace(plan, schedule=name_of(plan.schedule))
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    other = replace(ask, plan=cut(model, free, ask.cluster, ask.stack, **sizes))
    return other if verdict_of(other).fits else None


def told(found: Better | None) -> Told:
    """The key `better_cut`, and a line of the page."""
    if found is None:
        return {"better_cut": None}, ""
    facts = {
        "blocks": list(found.blocks), "plan": str(found.answer.question.plan), "gain": found.gain,
        "step_s": found.answer.price.step,
    }  # fmt: skip
    return {"better_cut": facts}, lines([("cut", found.sentence(fits=True))])[0]
