"""What a timetable costs a whole rank: its stages' times from the rank's, its span, its bubble."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.programs.pipeline import Placed, Timetable, play_costs


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of one rank's share of the model for one micro-batch: F, B towards the input, W, and of a message."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    send: float = 0.0

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.weight


def played(timetable: Timetable, costs: Costs, together: float | None = None) -> list[Placed]:
    """`play_costs` with a rank's costs shared evenly by its stages; B and W as one where the timetable has no W.

    The two copies of DualPipe are whole ones: each stage costs what a rank's share does.
    """
    each = timetable.length / len(timetable.rows)
    backward = costs.backward if timetable.splits_backward else costs.backward + costs.weight
    return play_costs(
        timetable, costs.forward / each, backward / each, costs.send, costs.weight / each, together
    )


def slowest(placed: Sequence[Placed]) -> float:
    """The longest time between a row's own first start and last stop.

    That is what a step costs where no rank waits for another to update its weights (the paper's validation after the
    update): a rank that starts later may end later too.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for row, _, start, stop in placed:
        if start < first.get(row, math.inf):
            first[row] = start
        if stop > last.get(row, -math.inf):
            last[row] = stop
    return max((last[row] - first[row] for row in first), default=0.0)
