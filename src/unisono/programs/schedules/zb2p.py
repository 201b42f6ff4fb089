"""Zero bubble in twice 1F1B's memory (ZB-2p; Qi et al., 2024, arXiv 2401.10241)."""

from unisono.programs.pipeline import Timetable
from unisono.programs.pricing import Costs
from unisono.programs.schedules import Schedule
from unisono.programs.zero_bubble import automatic, handcrafted


class Zb2p(Schedule):
    """No bubble at all if F, B and W cost the same and micros >= 2 ranks - 1; any number is served.

    That is: between its own first start and last stop no rank waits. Ranks start and end one after the other, so their
    updates must not wait for each other either. With other costs at most (ranks-1)(F+B-2W) where that is positive. Each
    rank holds at most 2 ranks micro-batches, from F until W. The order is made for `costs`, equal ones if not given;
    see `zero_bubble.automatic` for `kept`.
    """

    name = "zb2p"

    def timetable(self, ranks: int, micros: int) -> Timetable:
        return self.fitted(ranks, micros, Costs())

    def fitted(self, ranks: int, micros: int, costs: Costs, kept: float = 1.0) -> Timetable:
        return automatic(ranks, micros, 2, costs, kept)

    def by_hand(self, ranks: int, micros: int) -> Timetable:
        """The paper's ZB-H2, whatever the costs: bubble (ranks-1)(F+B-2W), at most 2 ranks - 1 micro-batches held."""
        return handcrafted(ranks, micros, 2)
