"""What a verdict takes from traced steps, and from the rows of single collectives: calls, bubble, exposed by axis."""

import statistics
from collections import defaultdict
from collections.abc import Iterator

from unisono.programs.pipeline import bubble as idle_share
from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.report import pipelines
from unisono.report.collect import RunRecord
from unisono.report.verdict.evidence import BubbleSeen, CallsSeen


def calls(run: RunRecord) -> tuple[CallsSeen, ...]:
    """Collectives by axis and operation, of a mean rank's step: from the ranks' rows, else from traced spans, whose
    seconds are those of waiting too."""
    rows = list(_rows(run)) or list(_spans(run))
    sums: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for axis, op, nbytes, seconds in rows:
        sums[axis, op].append((nbytes, seconds))
    steps = _steps(run) or 1
    return tuple(
        CallsSeen(
            axis,
            op,
            len(each) / steps,
            sum(nbytes for nbytes, _ in each) / steps,
            sum(seconds for _, seconds in each) / steps,
            statistics.quantiles([seconds for _, seconds in each], n=10)[0] if len(each) > 1 else each[0][1],
        )
        for (axis, op), each in sums.items()
    )


def _steps(run: RunRecord) -> int:
    """Pairs of a step and a rank whose calls were seen."""
    told = sum(isinstance(line.get("calls"), list) for facts in run.ranks for line in facts.steps)
    return told or sum(
        len({s.tags.get("step") for s in trace.spans if isinstance(s.tags.get("step"), int)})
        for trace in run.traces
    )


def _rows(run: RunRecord) -> Iterator[tuple[str, str, float, float]]:
    """(axis, operation, bytes, seconds since the last rank had arrived) of each call of each rank."""
    by_step: dict[int, list[list[list]]] = defaultdict(list)
    for facts in run.ranks:
        for line in facts.steps:
            if isinstance(line.get("calls"), list) and isinstance(line.get("start"), int | float):
                start = line["start"]
                by_step[line["step"]].append(
                    [[*row[:5], start + row[5], start + row[6]] for row in line["calls"]]
                )
    for ranks in by_step.values():
        for at in range(min(map(len, ranks))):
            alike = [row[at] for row in ranks if row[at][:2] == ranks[0][at][:2]]
            last = max(row[5] for row in alike)
            for axis, op, nbytes, _, _, _, end in alike:
                yield axis, op, nbytes, max(0.0, end - last)


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
