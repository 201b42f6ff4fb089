"""Where the model is better cut into stages: the cut whose dearest stage is cheapest of all whose stages fit.

A stage's seconds and bytes grow with its blocks, so for a given most of seconds each stage takes as many as it can; the
least most by which all blocks find a place is the best (as in the partitioning of PipeDream, Narayanan et al., 2019,
with memory as a second limit).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.planner.cuts import CUTTABLE, rows_of, with_cut
from unisono.planner.memory import RowShare, kept_of, of_share, share_of
from unisono.planner.price import detail
from unisono.planner.priced import shares_cores
from unisono.planner.simulate import Answer, Question, gain, simulate
from unisono.planner.tell import Told
from unisono.planner.timetables import ends, in_flight, name_of
from unisono.planner.work.transformer import Transformer

_WORTH = 1e-3  # of a step: less than that is not said


@dataclass(frozen=True, slots=True)
class Better:
    """Another cut: blocks by stage, and its answer. gain: share of the step that it saves."""

    blocks: tuple[int, ...]
    answer: Answer
    gain: float

    @property
    def schedule(self) -> str:
        return self.answer.question.plan.schedule


def better(answer: Answer) -> Better | None:
    """A cut that is quicker, or that fits where the plan's own does not; None where there is none."""
    ask = answer.question
    blocks = best(ask)
    if blocks is None:
        return None
    plan = replace(ask.plan, schedule=with_cut(ask.plan.schedule, blocks))
    other = simulate(replace(ask, plan=plan))
    saved = gain(other, answer)
    helps = other.verdict.fits and (not answer.verdict.fits or saved >= _WORTH)
    return Better(blocks, other, saved) if helps else None


def best(ask: Question) -> tuple[int, ...] | None:
    """Blocks by stage; None where no cut fits, or where rows have several stages."""
    model, plan = ask.model, ask.plan
    if not isinstance(model, Transformer) or shares_cores(model, ask.cluster) or plan.recompute == "auto":
        return None
    if plan.pp == 1 or name_of(plan.schedule) not in CUTTABLE:
        return None
    each = _seconds(ask, model)
    limits = sorted({seconds for row in each for seconds in row})
    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        counts = [_most(row, limits[middle]) for row in each]
        if sum(counts) >= model.n_layer and all(counts):
            high = middle
        else:
            low = middle + 1
    if low == len(limits):
        return None
    counts = [_most(row, limits[low]) for row in each]
    while sum(counts) > model.n_layer:  # one block less where it is dearest
        row = max((r for r in range(plan.pp) if counts[r] > 1), key=lambda r: each[r][counts[r] - 1])
        counts[row] -= 1
    return tuple(counts)


def _most(row: Sequence[float], limit: float) -> int:
    """Blocks that a stage takes in so many seconds; of a stage with k blocks row[k - 1]."""
    return sum(seconds <= limit for seconds in row)


def _seconds(ask: Question, model: Transformer) -> list[list[float]]:
    """Of each stage, with 1, 2, 3 … blocks while it fits, seconds of one micro-batch."""
    plan, stack = ask.plan, ask.stack
    made = detail(model, plan, ask.cluster, stack, ask.micro_batch).blocks
    kept = kept_of(model, plan, stack, ask.micro_batch)
    device = ask.cluster.device
    stems, heads = ends(plan.schedule, plan.pp)
    found: list[list[float]] = []
    for row, own in enumerate(rows_of(model, plan.schedule, plan.pp, stack.balanced)):
        share = share_of(model, plan, row, stack.balanced)
        held = in_flight(plan.schedule, row, plan.pp, ask.micros)
        rim = (row in stems) * sum(made.stem) + (row in heads) * sum(made.head)
        some: list[float] = []
        for count in range(1, model.n_layer - plan.pp + 2):
            part = _with(share, own, count)
            if of_share(model, plan, stack, part, kept, held).total > device.room:
                break
            some.append(rim + count * (made.forward + made.backward))
        found.append(some)
    return found


def _with(share: RowShare, own: float, count: int) -> RowShare:
    """A row's share with another number of blocks."""
    return replace(
        share, layers=float(count), blocks=share.blocks / own * count, routed=share.routed / own * count
    )


def sentence(found: Better, fits: bool) -> str:
    cut = f"schedule={found.schedule}"
    if not fits:
        return f"{cut} fits: {found.answer.price.step:.4g} s a step"
    return f"{cut} would be {100 * found.gain:.1f} % quicker: {found.answer.price.step:.4g} s a step"


def told(found: Better | None) -> Told:
    """The key `better_cut`, and a line of the page."""
    if found is None:
        return {"better_cut": None}, ""
    got = {"blocks": list(found.blocks), "plan": str(found.answer.question.plan), "gain": found.gain}
    facts = {**got, "step_s": found.answer.price.step}
    return {"better_cut": facts}, f"{'cut':<11}{sentence(found, fits=True)}"
