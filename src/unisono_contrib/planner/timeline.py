"""One simulated step as it would be seen: when each rank of a pipeline computes what, and what follows.

The timetable is the value that the runtime plays; here it is played against the clock with the planner's prices.
"""

from dataclasses import dataclass

from unisono.planner import pricing
from unisono.planner.price_parts import Price
from unisono.planner.request import PlanRequest
from unisono.programs.pipeline import Placed, Timetable
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError

LARGEST = 200_000  # actions; a few seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of every row of the pipeline, in seconds from its start.

    after: (part, seconds) of what all rows do when the last one has ended, in this order; parts are `comm AXIS`,
    `optim`, `other`, `wait stragglers` and `data`.
    """

    timetable: Timetable
    placed: tuple[Placed, ...]
    after: tuple[tuple[str, float], ...]


def timeline(ask: PlanRequest, price: Price) -> Timeline:
    """A step of the plan; on a host whose ranks share its cores the very one that was priced. Raises UsageError where
    the timetable does not take these numbers, or is too long."""
    table = timetable(ask)
    shown = [
        (f"comm {axis}", traffic.exposed if axis == "dp" else traffic.after)  # dp has nothing else
        for axis, traffic in price.comm.items()
    ]
    after = [
        *shown,
        ("optim", price.optimizer),
        ("other", price.fixed),
        ("wait stragglers", price.straggling),
        ("data", price.loading),
    ]
    return Timeline(table, tuple(pricing.placed(ask, table)), tuple(part for part in after if part[1] > 0))


def timetable(ask: PlanRequest) -> Timetable:
    """The plan's timetable. Raises UsageError."""
    if 6 * ask.plan.pp * ask.micros > LARGEST:
        raise UsageError(
            f"a timetable of {ask.plan.pp} ranks and {ask.micros} micro-batches is too long to be drawn",
            where=f"{ask.plan}",
            fix="a smaller --train.global_batch: the pattern in the middle repeats itself",
            code="C22",
        )
    table = SCHEDULES.read(ask.plan.schedule).timetable(ask.plan.pp, ask.micros)
    if table.length > ask.model.n_layer:
        raise UsageError(
            f"{ask.plan.schedule} has {table.length} stages, the model {ask.model.n_layer} layers",
            where=f"{ask.plan}",
            fix="a smaller pp, or another schedule",
            code="C22",
        )
    return table
