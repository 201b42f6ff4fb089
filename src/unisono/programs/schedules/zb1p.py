"""Zero bubble in 1F1B's memory: weight gradients fill a part of the bubble (ZB-1p; Qi et al., 2024, 2401.10241)."""

from unisono.programs.pipeline import Timetable
from unisono.programs.pricing import Costs
from unisono.programs.zero_bubble import automatic, handcrafted


def timetable(ranks: int, micros: int, costs: Costs = Costs(), kept: float = 1.0) -> Timetable:
    """Bubble (ranks-1)(F+B-W) with B towards the input alone, from micros >= ranks on; any number is served.

    In papers that count W within B this is (ranks-1)(F+B-2W). Each rank holds at most `ranks` micro-batches, from F
    until W. The order is made for `costs`, equal ones if not given; see `zero_bubble.automatic` for `kept`.
    """
    return automatic(ranks, micros, 1, costs, kept)


def zb_h1(ranks: int, micros: int) -> Timetable:
    """The paper's ZB-H1, whatever the costs: the same bubble and memory where messages cost nothing."""
    return handcrafted(ranks, micros, 1)
