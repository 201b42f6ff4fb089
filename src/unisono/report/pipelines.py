"""A pipeline's timetable as planned and as it ran, from the traced step; and what other charts need of traces."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.observe.span import Span
from unisono.observe.trace import Trace
from unisono.programs.pipeline import Placed, Timetable, bubble, play_costs
from unisono.programs.schedules import SCHEDULES
from unisono.report.collect import Record, RunRecord
from unisono.report.placed import computed, from_zero
from unisono.spec.errors import UsageError
from unisono.spec.words import whole


@dataclass(frozen=True)
class Pipeline:
    """One step's timetable as planned (with measured costs) and as it happened; seconds from its start."""

    schedule: str
    rows: tuple[str, ...]
    planned: tuple[Placed, ...]
    measured: tuple[Placed, ...]
    planned_bubble: float
    measured_bubble: float
    ideal_bubble: float
    step: int
    replica: str = ""


def traced_step(traces: Sequence[Trace]) -> int | None:
    """The last step that most traces hold: the one to draw; None if no span names a step."""
    counts: dict[int, int] = {}
    for trace in traces:
        for step in {s.tags["step"] for s in trace.spans if isinstance(s.tags.get("step"), int)}:
            counts[step] = counts.get(step, 0) + 1
    most = max(counts.values(), default=0)
    return max((step for step, count in counts.items() if count == most), default=None)


def chosen(traces: Sequence[Trace], limit: int) -> list[Trace]:
    """At most `limit` traces, evenly spread over the ranks, so that all stages are among them."""
    if len(traces) <= limit:
        return list(traces)
    return [traces[i * (len(traces) - 1) // (limit - 1)] for i in range(limit)]


def spans_of(trace: Trace, step: int | None) -> list[Span]:
    """The spans of one step (all, if no step is named), by start."""
    spans = [s for s in trace.spans if step is None or s.tags.get("step") == step]
    return sorted(spans, key=lambda s: (s.start_ns, -s.stop_ns))


def pipeline_of(run: RunRecord) -> Pipeline | None:
    """Planned and measured timetable of the traced step, for its slowest replica; None without `pp`.

    The plan is played with the mean measured cost of each stage, so the two differ only by what the plan
    does not know: communication, jitter, ranks that disturb each other.
    """
    name, ranks, micros = _timetable_words(run)
    step = traced_step(run.traces)
    if ranks < 2:
        return None
    replica, happened = _measured(run, step)
    if not happened:
        return None
    micros = max(micros, 1 + max(p.action.micro for p in happened))
    try:
        timetable: Timetable = SCHEDULES.read(name).timetable(ranks, micros)
    except (UsageError, TypeError):
        return None
    forward, backward = (
        _stage_costs(happened, "F", timetable.stages),
        _stage_costs(happened, "B", timetable.stages),
    )
    planned = play_costs(timetable, forward, backward)
    return Pipeline(
        schedule=name,
        rows=tuple(f"pp={row}" for row in range(ranks)),
        planned=tuple(planned),
        measured=tuple(happened),
        planned_bubble=bubble(planned, ranks),
        measured_bubble=bubble(happened, ranks),
        ideal_bubble=bubble(play_costs(timetable, 1.0, 2.0), ranks),
        step=step if step is not None else 0,
        replica=replica,
    )


def _measured(run: RunRecord, step: int | None) -> tuple[str, list[Placed]]:
    """The forwards and backwards of the replica that took longest, and its place on the other axes."""
    places = {facts.rank: facts.coords for facts in run.ranks}
    replicas: dict[str, list[Placed]] = {}
    for trace in run.traces:
        coords = places.get(trace.rank, {})
        replica = " ".join(f"{axis}={at}" for axis, at in coords.items() if axis != "pp")
        replicas.setdefault(replica, []).extend(computed(spans_of(trace, step), coords.get("pp")))
    replicas = {name: placed for name, placed in replicas.items() if placed}
    if not replicas:
        return "", []
    name = max(
        replicas, key=lambda name: max(p.stop for p in replicas[name]) - min(p.start for p in replicas[name])
    )
    return name if len(replicas) > 1 else "", from_zero(replicas[name])


def _stage_costs(placed: Sequence[Placed], kind: str, stages: int) -> list[float]:
    every = [p.stop - p.start for p in placed if p.action.kind == kind] or [0.0]
    costs = []
    for stage in range(stages):
        mine = [p.stop - p.start for p in placed if p.action.kind == kind and p.action.stage == stage]
        costs.append(statistics.fmean(mine or every))
    return costs


def _timetable_words(run: RunRecord) -> tuple[str, int, int]:
    """(schedule, ranks, micros) from the summary, or else from the plan; one rank means no pipeline."""
    words: Record = {key: value for key, _, value in (word.partition("=") for word in run.plan.split())}
    words["ranks"] = words.get("pp", 1)
    timetable = run.summary.get("timetable")
    if isinstance(timetable, dict):
        words.update({key: value for key, value in timetable.items() if value is not None})
    return str(words.get("schedule", "1f1b")), _whole(words["ranks"], 1), _whole(words.get("micros"), 0)


def _whole(value: object, otherwise: int) -> int:
    number = whole(str(value)) if isinstance(value, int | str) else None
    return otherwise if number is None else number
