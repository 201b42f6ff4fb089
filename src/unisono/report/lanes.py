"""The parts of the page with one row per rank: a step's timeline, the pipeline's timetable, who is slow."""

from collections.abc import Sequence
from html import escape

from unisono.observe.trace import Trace
from unisono.programs import draw
from unisono.report import chart, words
from unisono.report.analyse import BUSY, PARTS, Pipeline, chosen, percent, spans_of, traced_step
from unisono.report.collect import Record, RunRecord

_TIMELINE_ROWS, _TIMELINE_SPANS = 16, 600
_HEAT_COLUMNS, _HEAT_ROWS = 60, 48


def timeline(run: RunRecord) -> str:
    """One step of all ranks, from the traces; "" without them."""
    step = traced_step(run.traces)
    traces = chosen(run.traces, _TIMELINE_ROWS)
    spans = [span for trace in traces for span in spans_of(trace, step)]
    if not spans:
        return ""
    begin, end = min(s.start_ns for s in spans), max(s.stop_ns for s in spans)
    blocks = [block for row, trace in enumerate(traces) for block in _blocks(row, trace, step, begin)]
    used = [p for p in (*PARTS, "comm_hidden") if any(b.fill == _fill(p) for b in blocks)]
    places = {facts.rank: facts.place for facts in run.ranks}
    which = f" {step}" if step is not None else ""
    more = f" {len(traces)} of {len(run.traces)} ranks are drawn." if len(run.traces) > len(traces) else ""
    drawn = draw.blocks_svg(
        blocks,
        [""] * len(traces),
        title=f"Timeline of step{which}, all ranks",
        begin=0.0,
        until=end - begin,
        gutter=0,
    )
    height = 34 if any(b.thin for b in blocks) else 26
    names = "".join(_row_name(f"rank {t.rank}", places.get(t.rank, ""), height) for t in traces)
    return (
        f'<section data-testid="timeline"><h2>One step: {escape(which.strip() or "all that was traced")}</h2>'
        f'{chart.legend(used)}<div class="rows"><div class="names">{names}</div>{drawn}</div>'
        f"{chart.time_axis((end - begin) * 1e-9)}"
        f'<p class="note">Numbers are micro-batches.{more} Point at a block for its time. '
        "The same spans are in trace/, for Perfetto or chrome://tracing.</p></section>"
    )


def _blocks(row: int, trace: Trace, step: int | None, begin: int) -> list[draw.Bar]:
    spans = spans_of(trace, step)
    if len(spans) > _TIMELINE_SPANS:  # the longest are the ones that can be seen
        longest = sorted(spans, key=lambda s: s.start_ns - s.stop_ns)[:_TIMELINE_SPANS]
        spans = sorted(longest, key=lambda s: (s.start_ns, -s.stop_ns))
    blocks = []
    for span in spans:
        hidden = span.kind == "comm" and not span.tags.get("exposed", True)
        part = {"comm": "comm_hidden" if hidden else "comm_exposed"}.get(span.kind, span.kind)
        micro = span.tags.get("micro")
        told = [words.PART_NAMES.get(part, part)]
        told += [f"micro-batch {micro}"] if micro is not None else []
        told += [f"{span.tags.get('axis', '')} {span.tags['op']}".strip()] if "op" in span.tags else []
        told += [words.nbytes(span.tags["bytes"])] if words.is_number(span.tags.get("bytes")) else []
        start, stop = span.start_ns - begin, span.stop_ns - begin
        at, length = words.seconds(start * 1e-9), words.seconds((stop - start) * 1e-9)
        blocks.append(
            draw.Bar(
                row=row,
                start=start,
                stop=stop,
                fill=_fill(part),
                label=str(micro) if micro is not None and part in ("forward", "backward") else "",
                hover=f"rank {trace.rank}, {', '.join(told)}: at {at} for {length}",
                thin=hidden,
            )
        )
    return blocks


def _fill(part: str) -> str:
    return f"var(--{part if part in words.PART_NAMES else 'other'})"


def _row_name(name: str, place: str, height: int) -> str:
    small = f"<small>{escape(place)}</small>" if place else ""
    return f'<span style="height:{height}px">{escape(name)}{small}</span>'


def timetables(pipeline: Pipeline | None) -> str:
    """The pipeline's timetable as planned above the one that happened, on one time axis."""
    if pipeline is None:
        return ""
    until = max(p.stop for p in (*pipeline.planned, *pipeline.measured))
    names = "".join(_row_name(row, "", 26) for row in pipeline.rows)
    pictures = []
    for title, placed, idle in (
        ("Planned, with the measured cost of each stage", pipeline.planned, pipeline.planned_bubble),
        ("Measured", pipeline.measured, pipeline.measured_bubble),
    ):
        length = words.seconds(max(p.stop for p in placed))
        drawn = draw.svg(
            placed,
            pipeline.rows,
            title=f"{title}, {pipeline.schedule}",
            until=until,
            gutter=0,
            scale=1000,
            unit=" ms",
        )
        pictures.append(
            f"<h3>{title}: {length}, bubble {percent(idle)}</h3>"
            f'<div class="rows"><div class="names">{names}</div>{drawn}</div>'
        )
    which = f", slowest replica ({escape(pipeline.replica)})" if pipeline.replica else ""
    return (
        f'<section data-testid="pipeline"><h2>Pipeline timetable {escape(pipeline.schedule)}, '
        f"step {pipeline.step}{which}</h2>"
        f"{chart.legend(('forward', 'backward'))}{''.join(pictures)}{chart.time_axis(until)}"
        f'<p class="note">Both on one time axis; grey is idle. With equal stages and free messages this timetable '
        f"would idle {percent(pipeline.ideal_bubble)}.</p></section>"
    )


def heat(run: RunRecord) -> str:
    """Busy time of each rank at each step beside the median rank's: who is slow, and when."""
    ranks = [facts for facts in run.ranks if facts.steps]
    if len(ranks) < 2:
        return ""
    busy = {facts.rank: {r["step"]: _busy(r) for r in facts.steps} for facts in ranks}
    steps = sorted({step for per_step in busy.values() for step in per_step})
    size = -(-len(steps) // _HEAT_COLUMNS)
    columns = [steps[i : i + size] for i in range(0, len(steps), size)]
    medians = [_median([per[s] for per in busy.values() for s in column if s in per]) for column in columns]
    rows: list[tuple[str, list[float | None]]] = []
    per_row = -(-len(ranks) // _HEAT_ROWS)
    for i in range(0, len(ranks), per_row):
        group = ranks[i : i + per_row]
        cells: list[float | None] = []
        for column, median in zip(columns, medians, strict=True):
            values = [busy[f.rank][s] for f in group for s in column if s in busy[f.rank]]
            cells.append(sum(values) / len(values) / median if values and median else None)
        name = f"rank {group[0].rank}" + (f" to {group[-1].rank}" if len(group) > 1 else "")
        rows.append((name, cells))
    drawn = chart.heat_map(
        rows,
        [str(c[0]) if len(c) == 1 else f"{c[0]} to {c[-1]}" for c in columns],
        "Busy time of each rank at each step",
    )
    return (
        '<section data-testid="heat"><h2>Who is slow, and when</h2>'
        f'{drawn}<p class="note">Busy time (a step without waiting and communication) of each rank, beside the median '
        "of all ranks at that step. A dark row is a slow rank, a dark column a slow moment.</p></section>"
    )


def _busy(record: Record) -> float:
    return sum(record["time"][part] for part in BUSY if words.is_number(record["time"].get(part)))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
