"""GPipe: all forwards, then all backwards (Huang et al., 2019)."""

from unisono.programs.pipeline import Action, Timetable
from unisono.programs.schedules import Schedule


class GPipe(Schedule):
    """Bubble (ranks-1)/(micros+ranks-1), all micro-batches' activations held.

    The backwards run in the order of the forwards, not in the paper's reverse one: gradients are then summed in the
    same order as by every other schedule, and stay bit-identical to theirs.
    """

    name = "gpipe"
    heaped = True
    played = True

    def timetable(self, ranks: int, micros: int) -> Timetable:
        rows = tuple(
            tuple(Action(kind, stage, micro) for kind in ("F", "B") for micro in range(micros))
            for stage in range(ranks)
        )
        return Timetable(rows, placement=tuple(range(ranks)), micros=micros)
