"""Zero bubble in 1F1B's memory: weight gradients fill a part of the bubble (ZB-1p; Qi et al., 2024, 2401.10241)."""

from typing import ClassVar

from unisono.programs.pipeline import Timetable
from unisono.programs.schedules import Schedule
from unisono_contrib.programs.zero_bubble import bubble, handcrafted


class Zb1p(Schedule):
    """Bubble (ranks-1)(F+B-W) with B towards the input alone, from micros >= ranks on; any number is served.

    In papers that count W within B this is (ranks-1)(F+B-2W). Each rank holds at most `ranks` micro-batches, from F
    until W. The order is the paper's ZB-H1, which suits equal costs: a run does not know its costs beforehand.
    """

    name = "zb1p"
    played = True
    halves = late = True
    memory: ClassVar[int] = 1  # in micro-batches, over the ranks

    def held(self, row: int, ranks: int, micros: float) -> float:
        return float(self.memory * ranks)

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        return bubble(self.memory, ranks, micros, forward, backward, weight)

    def timetable(self, ranks: int, micros: int) -> Timetable:
        return handcrafted(ranks, micros, self.memory)
