"""The panel of the heat map, whose cells come as tiles."""

from unisono.report.charts import HEAT
from unisono_contrib.report.dash.lateness import LatenessMap
from unisono_contrib.report.dash.panels import Panel


def heat(late: LatenessMap, every: int, is_whole: bool) -> Panel:
    """every: one in so many steps was read. is_whole: whether the past has been read by now."""
    note = (
        "Seconds later than the median rank at the collective at which ranks were furthest apart."
        if late.by_calls
        else "Seconds of work beside the median rank's: these lines hold no collectives."
    )
    if every > 1:
        note += f" Drawn from one in {every} steps; zoom in to read all."
    if not is_whole:
        note += " The past is still being read."
    return {
        "id": "heat", "kind": "heat", "title": "How late each rank was in each step", "note": note,
        "ranks": late.ranks, "steps": late.steps, "version": late.version, "ramp": HEAT, "half": False,
    }  # fmt: skip
