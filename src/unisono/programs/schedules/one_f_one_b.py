"""1F1B: as few forwards ahead as the pipeline's depth asks for (PipeDream-Flush; Narayanan et al., 2021)."""

from unisono.programs.pipeline import Action, Timetable
from unisono.programs.schedules import Schedule


class OneFOneB(Schedule):
    """Bubble (ranks-1)/(micros+ranks-1) as GPipe, but stage s holds at most ranks-s activations."""

    name = "1f1b"
    played = True

    def timetable(self, ranks: int, micros: int) -> Timetable:
        return Timetable(
            rows=tuple(_row(stage, ranks, micros) for stage in range(ranks)),
            placement=tuple(range(ranks)),
            micros=micros,
        )


def _row(stage: int, ranks: int, micros: int) -> tuple[Action, ...]:
    ahead = min(ranks - 1 - stage, micros)
    actions = [Action("F", stage, micro) for micro in range(ahead)]
    for micro in range(micros):
        if micro + ahead < micros:
            actions.append(Action("F", stage, micro + ahead))
        actions.append(Action("B", stage, micro))
    return tuple(actions)
