"""Zero bubble in 1F1B's memory: weight gradients fill a part of the bubble (ZB-1p; Qi et al., 2024, 2401.10241)."""

from typing import ClassVar

from unisono.programs.pipeline import Timetable
from unisono.programs.schedules import Schedule
from unisono_contrib.programs.pricing import Costs
from unisono_contrib.programs.zero_bubble import automatic, bubble, handcrafted


class Zb1p(Schedule):
    """Bubble (ranks-1)(F+B-W) with B towards the input alone, from micros >= ranks on; any number is served.

    In papers that count W within B this is (ranks-1)(F+B-2W). Each rank holds at most `ranks` micro-batches, from F
    until W. A run plays the order for equal costs; `fitted` makes it for others (`kept`: see `zero_bubble.automatic`).
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
        return self.fitted(ranks, micros, Costs())

    def fitted(self, ranks: int, micros: int, costs: Costs, kept: float = 1.0) -> Timetable:
        """The order for these costs, which no run knows beforehand: what the paper's figures are made with."""
        return automatic(ranks, micros, self.memory, costs, kept)

    def by_hand(self, ranks: int, micros: int) -> Timetable:
        """The paper's order, whatever the costs. ZB-H1: the same bubble and memory where messages cost nothing. ZB-H2:
        bubble (ranks-1)(F+B-2W), at most 2 ranks - 1 micro-batches held."""
        return handcrafted(ranks, micros, self.memory)
