"""What a verdict takes from traced steps, and from the rows of single collectives: calls, bubble, exposed by axis."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from unisono.programs.pipeline import bubble as idle_share
from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.report import pipelines
from unisono.report.calls import StepCalls
from unisono.report.collect import RunRecord
from unisono.report.verdict.evidence import BubbleSeen, CallsSeen


def calls(run: RunRecord, met: Sequence[StepCalls]) -> tuple[CallsSeen, ...]:
    """Collectives by axis and operation, of a mean rank's step: from the ranks' rows in `met`, else from traced spans,
    whose seconds are those of waiting too."""
    sums: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    if met:
        for step in met:
            for call in step.meetings:
                moving = min(call.moving, statistics.fmean(call.exposed.values()))
                sums[call.axis, call.op].append((call.nbytes, moving))
        rows = sum(len(step.meetings) for step in met)
        left_out = sum(statistics.fmean(rank.left_out for rank in step.ranks.values()) for step in met)
        many, scale = len(met), 1.0 + left_out / rows if rows else 1.0
    else:
        for axis, op, nbytes, seconds in _spans(run):
            sums[axis, op].append((nbytes, seconds))
        many, scale = _steps(run) or 1, 1.0
    return tuple(
        CallsSeen(
            axis,
            op,
            scale * len(each) / many,
            scale * sum(nbytes for nbytes, _ in each) / many,
            sum(seconds for _, seconds in each) / many,
        )
        for (axis, op), each in sums.items()
    )


def _steps(run: RunRecord) -> int:
    """Pairs of a step and a rank that were traced."""
    return sum(
        len({s.tags["step"] for s in trace.spans if isinstance(s.tags.get("step"), int)})
        for trace in run.traces
    )


def _spans(run: RunRecord) -> Iterator[tuple[str, str, float, float]]:
    for trace in run.traces:
        for span in trace.spans:
            if span.kind == "comm" and isinstance(span.tags.get("step"), int) and span.tags.get("axis"):
                nbytes = span.tags.get("bytes", 0)
                yield (
                    str(span.tags["axis"]),
                    str(span.tags.get("op", "")),
                    nbytes,
                    (span.stop_ns - span.start_ns) * 1e-9,
                )


def spread(run: RunRecord) -> dict[str, float]:
    """Shares of exposed communication by axis, in the traced steps; nothing without them."""
    axes: dict[str, float] = defaultdict(float)
    for trace in run.traces:
        for span in trace.spans:
            if span.kind == "comm" and span.tags.get("exposed", True):
                axes[str(span.tags.get("axis", ""))] += span.stop_ns - span.start_ns
    whole = sum(axes.values())
    return {axis: ns / whole for axis, ns in axes.items()} if whole else {}


def bubble(run: RunRecord) -> BubbleSeen | None:
    """The pipeline of the traced step; None without one."""
    seen = pipelines.pipeline_of(run)
    if seen is None:
        return None
    schedule, stages = SCHEDULES.read(seen.schedule), len(seen.rows)
    micros = 1 + max(placed.action.micro for placed in seen.measured)
    better = idle_share(play_costs(schedule.timetable(stages, 2 * micros), 1.0, 2.0), stages)
    seconds: dict[int, list[float]] = defaultdict(list)
    for placed in seen.measured:
        seconds[placed.row].append((placed.stop - placed.start) / micros)
    costs = tuple(sum(seconds[row]) for row in sorted(seconds))
    return BubbleSeen(seen.measured_bubble, seen.planned_bubble, seen.ideal_bubble, costs, better)
