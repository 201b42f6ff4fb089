"""One micro-batch after the other, wholly: on one rank gradient accumulation, on several a pipeline without overlap."""

from unisono.programs.pipeline import Action, Timetable
from unisono.programs.schedules import Schedule


class Accumulate(Schedule):
    """F and B of a micro-batch before the next one: one activation held, a bubble of (ranks-1)/ranks."""

    name = "accumulate"
    played = True
    alone = True

    def timetable(self, ranks: int, micros: int) -> Timetable:
        rows = tuple(
            tuple(Action(kind, stage, micro) for micro in range(micros) for kind in ("F", "B"))
            for stage in range(ranks)
        )
        return Timetable(rows, placement=tuple(range(ranks)), micros=micros)
