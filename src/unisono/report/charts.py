"""The charts of a run: what its page and its picture both show. None where nothing was recorded."""

import statistics
from collections.abc import Sequence

from unisono.observe.span import Span
from unisono.observe.trace import Trace
from unisono.report import picture
from unisono.report.analyse import TimeShares, bytes_table, dealt, peak_memory
from unisono.report.collect import RankFacts, Record, RunRecord
from unisono.report.picture import Bar, BarChart, BarRow, ChartLine, LineChart, Point
from unisono.report.pipelines import Pipeline, chosen, spans_of, traced_step
from unisono.report.placed import bars
from unisono.report.verdict.evidence import BUSY, STACKED
from unisono.spec import words
from unisono.spec.words import percent

TIMELINE_ROWS = 16
_SPANS = 600  # of a rank: the longest are the ones that can be seen
_HEAT_COLUMNS, _HEAT_ROWS = 60, 48
HEAT = ((255, 247, 205), (199, 218, 176), (90, 172, 178), (37, 104, 160), (22, 30, 90))
"""Red, green and blue of a cell from cold to hot, in even steps of lightness."""


def points_of(steps: Sequence[Record], key: str) -> list[Point]:
    """(step, value) of the steps that have a number under `key`."""
    return [(float(r["step"]), float(r[key])) for r in steps if words.is_number(r.get(key))]


def loss(run: RunRecord) -> LineChart | None:
    """The loss by step; smoothed where there are many steps."""
    points = points_of(run.steps, "loss")
    lines = [ChartLine("training", points)]
    if len(points) > 100:
        smoothed = picture.smooth_if_many(points)
        lines = [ChartLine("training, each step", points, "pale", 1.0), ChartLine("smoothed", smoothed)]
    validation = ChartLine("validation", run.validation, "accent_b", 2.5, dots=True)
    return picture.line_chart("Loss, by step", [*lines, validation])


def speed(run: RunRecord) -> LineChart | None:
    """Tokens or samples per second by step, without the first, which pays for warming up."""
    points = points_of(run.steps, "tokens_per_s")
    line = ChartLine(f"{run.unit} per second", points[1:] or points)
    return picture.line_chart(f"{run.unit.capitalize()} per second, by step", [line], zero=True)


def times(shares: Sequence[TimeShares]) -> BarChart:
    """One row per rank, as long as its step, cut into its parts; hidden communication along its foot."""
    bars: list[Bar] = []
    for row, spent in enumerate(shares):
        said = {
            part: f"{spent.name}: {words.PART_NAMES[part]} {words.seconds(s)}, {percent(s / spent.wall)} of a step"
            for part, s in spent.parts.items()
        }
        cuts = [(p, spent.parts.get(p, 0.0)) for p in STACKED]
        bars += picture.stacked(row, [(s, p, percent(s / spent.wall), said.get(p, "")) for p, s in cuts])
        if hidden := spent.parts.get("comm_hidden", 0.0):
            bars.append(Bar(row, 0.0, hidden, "comm_hidden", hover=said["comm_hidden"], thin=True))
    rows = [
        BarRow(time_share.name, time_share.place, words.seconds(time_share.wall)) for time_share in shares
    ]
    return BarChart(
        "Where the time of a step goes", rows, bars, max(time_share.wall for time_share in shares)
    )


def timeline(run: RunRecord) -> BarChart | None:
    """One step of all ranks, from their traces."""
    step, traces = traced_step(run.traces), chosen(run.traces, TIMELINE_ROWS)
    spans = [span for trace in traces for span in spans_of(trace, step)]
    if not spans:
        return None
    begin, end = min(s.start_ns for s in spans), max(s.stop_ns for s in spans)
    drawn = [_span(row, t, s, begin) for row, t in enumerate(traces) for s in _longest(spans_of(t, step))]
    places = {facts.rank: facts.place for facts in run.ranks}
    rows = [BarRow(f"rank {trace.rank}", places.get(trace.rank, "")) for trace in traces]
    length = (end - begin) * 1e-9
    title = f"One step: {step}" if step is not None else "One step: all that was traced"
    return BarChart(title, rows, drawn, length, ticks=picture.time_ticks(0.0, length))


def _longest(spans: list[Span]) -> list[Span]:
    kept = sorted(spans, key=lambda s: s.start_ns - s.stop_ns)[:_SPANS]
    return sorted(kept, key=lambda s: (s.start_ns, -s.stop_ns))


def _span(row: int, trace: Trace, span: Span, begin: int) -> Bar:
    hidden = span.kind == "comm" and not span.tags.get("exposed", True)
    part = {"comm": "comm_hidden" if hidden else "comm_exposed"}.get(span.kind, span.kind)
    micro, tags = span.tags.get("micro"), span.tags
    said = [words.PART_NAMES.get(part, part)]
    said += [f"micro-batch {micro}"] if micro is not None else []
    said += [words.traffic(str(tags.get("axis", "")), str(tags["op"]))] if "op" in tags else []
    said += [words.nbytes(tags["bytes"])] if words.is_number(tags.get("bytes")) else []
    start, stop = (span.start_ns - begin) * 1e-9, (span.stop_ns - begin) * 1e-9
    return Bar(
        row,
        start,
        stop,
        part if part in words.PART_NAMES else "other",
        label=str(micro) if micro is not None and part in ("forward", "backward") else "",
        hover=f"rank {trace.rank}, {', '.join(said)}: at {words.seconds(start)} for {words.seconds(stop - start)}",
        thin=hidden,
    )


def timetables(pipeline: Pipeline) -> list[BarChart]:
    """The pipeline's timetable as planned, and the one that happened, on one time axis."""
    until = max(p.stop for p in (*pipeline.planned, *pipeline.measured))
    rows, ticks = [BarRow(name) for name in pipeline.rows], picture.time_ticks(0.0, until)
    cases = (
        ("Planned, with the measured cost of each stage", pipeline.planned, pipeline.planned_bubble),
        ("Measured", pipeline.measured, pipeline.measured_bubble),
    )
    return [
        BarChart(
            f"{title}: {words.seconds(max(p.stop for p in placed))}, bubble {percent(idle)}",
            rows, bars(placed), until, ticks=ticks,
        )
        for title, placed, idle in cases
    ]  # fmt: skip


def heat(run: RunRecord) -> BarChart | None:
    """Busy time of each rank at each step beside the median rank's: who is slow, and when."""
    ranks = [facts for facts in run.ranks if facts.steps]
    if len(ranks) < 2:
        return None
    busy = {facts.rank: {r["step"]: _busy(r) for r in facts.steps} for facts in ranks}
    columns = dealt(sorted({step for per_step in busy.values() for step in per_step}), _HEAT_COLUMNS)
    groups = dealt(ranks, _HEAT_ROWS)
    drawn: list[Bar] = []
    for at, column in enumerate(columns):
        values = [per[s] for per in busy.values() for s in column if s in per]
        median = statistics.median_high(values) if values else 0.0
        steps = f"{column[0]} to {column[-1]}" if len(column) > 1 else f"{column[0]}"
        for row, group in enumerate(groups):
            values = [busy[f.rank][s] for f in group for s in column if s in busy[f.rank]]
            if values and median:
                ratio = statistics.fmean(values) / median
                said = f"{_names(group)}, step {steps}: {ratio:.2f}"
                drawn.append(Bar(row, at, at + 1, _heat(ratio), hover=said))
    tall = max(6, min(20, 480 // len(groups)))
    rows = [BarRow(_names(group) if tall >= 12 or not i % 4 else "") for i, group in enumerate(groups)]
    ends = [(0.0, f"step {columns[0][0]}"), (len(columns) - 0.5, f"{columns[-1][-1]}")]
    keys = {_heat(1.0): "as the median rank", _heat(1.5): "1.5 times as long", _heat(2.0): "twice as long"}
    title = "Busy time of each rank at each step"
    return BarChart(title, rows, drawn, len(columns), ticks=ends[: len(columns)], keys=keys, tall=tall)


def _names(group: Sequence[RankFacts]) -> str:
    return f"rank {group[0].rank}" + (f" to {group[-1].rank}" if len(group) > 1 else "")


def _busy(record: Record) -> float:
    return sum(record["time"][part] for part in BUSY if words.is_number(record["time"].get(part)))


def _heat(value: float) -> str:
    """Pale yellow (1: as the median rank) to dark blue (2 and above), in even steps of lightness."""
    at = min(1.0, max(0.0, value - 1.0)) * (len(HEAT) - 1)
    low = min(int(at), len(HEAT) - 2)
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(HEAT[low], HEAT[low + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def sent(run: RunRecord) -> BarChart | None:
    """Bytes of a step by axis and operation, the twelve largest."""
    rows = bytes_table(run)
    if not rows:
        return None
    title = f"Bytes sent in a step, all ranks together: {words.nbytes(sum(n for _, _, n in rows))}"
    shown = [(words.traffic(axis, op), n, words.nbytes(n)) for axis, op, n in rows[:12]]
    return picture.sized(title, shown)


def memory(run: RunRecord) -> BarChart | None:
    """Most memory in use, per rank; the sixteen largest where there are more."""
    rows = peak_memory(run)
    shown = sorted(rows, key=lambda row: -row[1])[:16] if len(rows) > 16 else rows
    sizes = [(name, size, words.mebibytes(size)) for name, size in shown]
    return picture.sized("Most memory in use, per rank", sizes) if sizes else None
