"""ZB-V: two stages a rank, placed like a V, zero bubble in 1F1B's memory (Qi et al., 2024, arXiv 2401.10241)."""

from unisono.programs.pipeline import COMPUTE, Action, Kind, Timetable
from unisono.programs.schedules import VShaped
from unisono.spec.numbers import larger, smaller
from unisono_contrib.programs.zero_bubble import spare


class ZbV(VShaped):
    """No bubble if F, B and W cost the same and micros >= 2 ranks - 1.

    That is: no rank waits between its own first start and its last stop. Rank r owns stages r and 2 ranks - 1 - r, so
    the first rank also computes the loss, and the backward begins where the forward did. At most `ranks` whole shares
    of activations are held, that is 2 ranks stages' worth, from F until W. The order is the one for equal costs. Fewer
    micro-batches are served by leaving out the others' places, with a bubble. Each stage's gradients are in ascending
    order of micro-batches.
    """

    name = "zbv"
    played = True

    def held(self, row: int, ranks: int, micros: float) -> float:
        return float(ranks)

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        turns, least = ranks - 1, spare(forward, backward, weight)
        missing = smaller(larger(0, 2 * ranks - 1 - micros), turns) * least
        return (
            turns * (larger(forward, backward - weight) - least)
            + missing
            + larger(0, ranks - micros) * forward
        )

    def timetable(self, ranks: int, micros: int) -> Timetable:
        rows = tuple(_row(rank, ranks, micros) for rank in range(ranks))
        return Timetable(rows, self.placement(ranks), micros)


def _row(rank: int, ranks: int, micros: int) -> tuple[Action, ...]:
    stages = (rank, 2 * ranks - 1 - rank)
    count: dict[tuple[Kind, int], int] = {(kind, leg): 0 for kind in COMPUTE for leg in (0, 1)}
    row: list[Action] = []

    def take(*steps: tuple[Kind, int]) -> None:
        """Kind and leg of the V (0 down, 1 up); micro-batches that do not exist are left out."""
        for kind, leg in steps:
            micro = count[kind, leg]
            count[kind, leg] = micro + 1
            if micro < micros:
                row.append(Action(kind, stages[leg], micro))

    # The pattern needs 2 ranks - 1 micro-batches to turn over once.
    total = max(micros, 2 * ranks - 1)
    for _ in range(2 * (ranks - rank) - 1):
        take(("F", 0))
    for _ in range(rank):
        take(("F", 1), ("F", 0))
    for _ in range(ranks - rank):
        take(("F", 1), ("B", 1), ("W", 1))
    while count["F", 1] < total:
        if count["F", 0] < total:
            take(("F", 0))
        take(("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    for _ in range(rank):
        take(("B", 0), ("B", 1))
    for _ in range(ranks - rank):
        take(("B", 0), ("W", 0))
    for leg in (1, 0):
        for _ in range(total - count["W", leg]):
            take(("W", leg))
    return tuple(row)
