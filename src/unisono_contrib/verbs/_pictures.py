"""The pictures of `unisono simulate`: the planner's answer handed to the report's pen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.observe.trace import write_groups
from unisono.planner.simulate import PlanResult
from unisono.report.placed import lanes
from unisono_contrib.planner.timeline import timeline
from unisono_contrib.report.forecast import Forecast, write


def pictures(answer: PlanResult, facts: Mapping[str, Any], out: str | None, trace: str | None) -> list[str]:
    """Writes what is asked for, a picture or a trace, and returns the paths. Raises UsageError, OSError."""
    step = timeline(answer.request, answer.price)
    count = len(step.timetable.rows)
    names = [f"pp={row}" if count > 1 else "all ranks" for row in range(count)]
    written: list[Path] = []
    if out is not None:
        written.append(write(Forecast(facts, step.placed, step.after, names), out))
    if trace is not None:
        written.append(write_groups(trace, {"simulated": lanes(step.placed, names, step.after)}))
    return [str(path) for path in written]
