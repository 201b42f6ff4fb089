"""One simulated step as it would be seen: when each rank of a pipeline computes what, and what follows.

The timetable is the value that the runtime plays; here it is played against the clock with the planner's prices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.planner.cuts import given, with_cut
from unisono.planner.memory import Again
from unisono.planner.price import Price
from unisono.planner.priced import rows
from unisono.planner.simulate import Question
from unisono.programs import schedules
from unisono.programs.pipeline import Placed, Timetable, bubble, play_costs
from unisono.spec.errors import UsageError

LARGEST = 200_000  # actions; a few seconds


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of one micro-batch, by stage. backward: all of it, or towards the input where the timetable splits it;
    weight: the rest. send: of a message between two rows."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    send: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of every row of the pipeline, in seconds from its start.

    after: (part, seconds) of what all rows do when the last one has ended, in this order; parts are `comm AXIS`,
    `optim` and `other`. bubble: share of the rows' time until then in which nothing is computed.
    """

    timetable: Timetable
    placed: tuple[Placed, ...]
    after: tuple[tuple[str, float], ...]
    bubble: float

    @property
    def computed(self) -> float:
        """Seconds until the last row has ended its last computation."""
        return max(p.stop for p in self.placed)

    @property
    def length(self) -> float:
        return self.computed + sum(seconds for _, seconds in self.after)


def timeline(ask: Question, price: Price) -> Timeline:
    """A step of the plan. Raises UsageError where the timetable does not take these numbers, or is too long."""
    made = timetable(ask)
    each = stages(ask, made, price.again)
    placed = play_costs(made, each.forward, each.backward, each.send, each.weight)
    shown = [
        (f"comm {axis}", traffic.exposed)
        for axis, traffic in price.comm.items()
        if axis == "dp" or (axis == "shard" and ask.plan.zero < 3)
    ]
    after = [*shown, ("optim", price.optimizer), ("other", price.fixed)]
    return Timeline(made, tuple(placed), tuple(a for a in after if a[1] > 0), bubble(placed, len(made.rows)))


def timetable(ask: Question) -> Timetable:
    """The plan's timetable. Raises UsageError."""
    if 6 * ask.plan.pp * ask.micros > LARGEST:
        raise UsageError(
            f"a timetable of {ask.plan.pp} ranks and {ask.micros} micro-batches is too long to be drawn",
            where=f"{ask.plan}",
            fix="a smaller --train.global_batch: the pattern in the middle repeats itself",
            code="C22",
        )
    made = schedules.get(ask.plan.schedule)(ask.plan.pp, ask.micros)
    if made.length > ask.model.n_layer:
        raise UsageError(
            f"{ask.plan.schedule} has {made.length} stages, the model {ask.model.n_layer} layers",
            where=f"{ask.plan}",
            fix="a smaller pp, or another schedule",
            code="C22",
        )
    return made


def stages(ask: Question, made: Timetable, again: Sequence[Again] = ()) -> Stages:
    """What each stage of a timetable costs. again: by row, what recompute=auto computes again."""
    # A chain of stages is priced as a pipeline of as many rows: stem on the first, head on the last, layers between.
    told = given(ask.plan.schedule)
    schedule = with_cut("1f1b", told) if told is not None else "1f1b"
    chain = replace(ask.plan, pp=made.length, schedule=schedule)
    per = made.length // ask.plan.pp  # stages on a row, which share what it computes again
    more = [again[row] for row in made.placement[: made.length]] if again else []
    shared = tuple(Again(one.selective / per, one.full / per) for one in more)
    cut = rows(ask.model, chain, ask.cluster, ask.stack, ask.micro_batch, shared)
    forward, both = cut.forward * made.chains, cut.backward * made.chains
    send = rows(ask.model, ask.plan, ask.cluster, ask.stack, ask.micro_batch).send
    if not made.splits_backward:
        return Stages(forward, both, (0.0,) * len(both), send)
    # Towards the weights a backward pass has the forward pass's products.
    weight = tuple(min(f, b / 2) for f, b in zip(forward, both, strict=True))
    return Stages(forward, tuple(b - w for b, w in zip(both, weight, strict=True)), weight, send)
