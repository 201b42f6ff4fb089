"""Timetables with the weights' gradients apart, so that they can fill bubbles (Qi et al., 2024, arXiv 2401.10241).

Stage s is on row s. Forwards, backwards and weight gradients of a stage each run in ascending order of micro-batches,
so gradients are summed as by every other schedule.
"""

from unisono.programs.pipeline import Action, Timetable
from unisono.spec.numbers import larger, smaller


def handcrafted(ranks: int, micros: int, depth: int) -> Timetable:
    """ZB-H1 (`depth` 1) and ZB-H2 (`depth` 2) of the paper.

    Stage s runs depth(ranks-1-s) forwards ahead of 1F1B's alternation and owes its W for depth s micro-batches: so
    every stage holds depth(ranks-1)+1 micro-batches, and the later a stage, the more W it has left to do at the end,
    while the backwards of the last micro-batches hurry to the first stage.
    """
    rows = []
    for stage in range(ranks):
        ahead, owed = min(depth * (ranks - 1 - stage), micros), depth * stage
        row = [Action("F", stage, micro) for micro in range(ahead)]
        for micro in range(micros):
            if micro + ahead < micros:
                row.append(Action("F", stage, micro + ahead))
            row.append(Action("B", stage, micro))
            if micro >= owed:
                row.append(Action("W", stage, micro - owed))
        row += [Action("W", stage, micro) for micro in range(max(0, micros - owed), micros)]
        rows.append(tuple(row))
    return Timetable(tuple(rows), tuple(range(ranks)), micros)


def bubble(depth: int, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
    """Seconds in which a row waits between its own first start and last stop, at most. backward includes weight."""
    owed = smaller(micros, depth * ranks) - 1
    return larger(0.0, (ranks - 1) * (forward + backward - weight) - owed * spare(forward, backward, weight))


def spare(forward: float, backward: float, weight: float) -> float:
    """What of a W fills the others' waiting: it is the least of the three parts."""
    return smaller(weight, smaller(forward, backward - weight))
