"""The bubble rates that the zero-bubble papers tabulate, from one set of times (Qi et al., 2024, arXiv 2401.10241)."""

from unisono.programs import schedules
from unisono.programs.pricing import Costs, bubble_rate
from unisono.programs.schedules import zb1p, zb2p


def bubble_rates(
    ranks: int, micros: int, costs: Costs, chunks: int = 1, kept: float = 1.0
) -> dict[str, float]:
    """A row of the paper's table 5, by its columns' names; schedules that refuse these numbers raise UsageError.

    `costs` are the profiled times of one of `ranks` stages. `chunks` is the v of 1F1B-I, the most that the layers
    allow (one layer each); `kept` the part of a micro-batch's activations that W still needs after B, which decides
    how many W the automatic schedules may owe. Cost is the slowest stage's own span: there the paper's updates are
    checked after the fact, so no stage waits for another's end.
    """
    timetables = {
        "b_1f1b": schedules.get("1f1b")(ranks, micros),
        "b_1f1b_i": schedules.get(f"interleaved:v={chunks}")(ranks, micros),
        "b_zbh1": zb1p.zb_h1(ranks, micros),
        "b_zbh2": zb2p.zb_h2(ranks, micros),
        "b_zb1p": zb1p.timetable(ranks, micros, costs, kept),
        "b_zb2p": zb2p.timetable(ranks, micros, costs, kept),
    }
    return {name: bubble_rate(timetable, costs) for name, timetable in timetables.items()}
