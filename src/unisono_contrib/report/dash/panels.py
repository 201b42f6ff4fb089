"""What a page shows of a run, panel by panel, as plain values: the charts are the report's, and a browser draws them.

A panel is an object: `id`, `title`, `kind` (what draws it), `half` (beside another in a wide window), and more by kind.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unisono.report import charts, collectives, expected, instruments, membership, picture
from unisono.report.analyse import Analysis, grouped, ledger
from unisono.report.collect import RunRecord
from unisono.report.page import tile_facts
from unisono.report.picture import BarChart, LineChart
from unisono.report.verdict.evidence import STACKED
from unisono.report.verdict.judge import as_json
from unisono.report.verdict.waterfall import in_words
from unisono.spec import words
from unisono.spec.words import percent
from unisono_contrib.report.dash.proof import badge

Panel = dict[str, Any]
SILENT = 60.0
"""Seconds without a step after which a run counts as silent."""
_POINTS = 600  # of a curve
_ROWS = 16  # of the ranks' times: of more ranks groups of neighbours are drawn


def figures(
    run: RunRecord, facts: Analysis, latest_at: float, name: str = "", judged_at: float = 0.0
) -> list[Panel]:
    """What every step changes. facts: as they were last worked out, at Unix time `judged_at`. latest_at: of the newest
    line. name: of a run among others."""
    tiles = {"id": "tiles", "kind": "tiles", "title": name and f"Run {name}", "tiles": _tiles(run, facts)}
    return [head(run, facts, latest_at, judged_at), tiles, *_curves(run), _members(run), _faults(run)]


def means(run: RunRecord, facts: Analysis) -> list[Panel]:
    """What is a mean over the latest steps of all ranks."""
    return [*_times(run, facts), *_pipeline(facts), *_collectives(run, facts), *_sizes(run), *_replicas(run)]


def head(run: RunRecord, facts: Analysis, latest_at: float, judged_at: float = 0.0) -> Panel:
    """The verdict and when it was worked out, how the run stands, and its proof."""
    verdict = facts.verdict
    steps = run.config.get("train", {}).get("steps") if isinstance(run.config.get("train"), dict) else None
    return {
        "id": "head", "kind": "head", "title": run.name, "folder": str(run.folder), "plan": run.plan,
        "sentence": verdict.sentence, "said": verdict.said, "trouble": verdict.trouble,
        "verdict": as_json(verdict), "judged_at": judged_at, "state": state_of(run, latest_at),
        "step": run.steps[-1]["step"] if run.steps else 0, "steps": steps if isinstance(steps, int) else None,
        "proof": badge(run),
    }  # fmt: skip


def state_of(run: RunRecord, latest_at: float) -> str:
    """`going`, `ended`, `failed` or `silent`."""
    last = run.history[-1] if run.history else {}
    if run.error:
        return "failed"
    if last.get("event") == "end" or (run.summary and not run.history):
        return "ended"
    return "silent" if latest_at and time.time() - latest_at > SILENT else "going"


def _tiles(run: RunRecord, facts: Analysis) -> list[Sequence[str]]:
    tiles: list[Sequence[str]] = [*tile_facts(run, facts)]
    sizes = [
        step["mem_mib"]
        for rank in run.ranks
        for step in rank.steps[-1:]
        if words.is_number(step.get("mem_mib"))
    ]
    if sizes:
        tiles.append(("memory", words.mebibytes(max(sizes)), "fullest rank, now"))
    return tiles


def _curves(run: RunRecord) -> Iterator[Panel]:
    for name, chart in (("loss", charts.loss(run)), ("speed", charts.speed(run))):
        if chart is not None:
            yield lines(name, chart)
        elif name == "loss":
            yield text("loss", "Loss", ["No step has been made yet."])


def _times(run: RunRecord, facts: Analysis) -> Iterator[Panel]:
    if not facts.shares:
        return
    shares = grouped(facts.shares, _ROWS)
    rows = [[f"{s.name} {s.place}", *(words.seconds(s.parts.get(p, 0.0)) for p in STACKED)] for s in shares]
    heads = ["rank", *(words.PART_NAMES[part] for part in STACKED)]
    latest = max((len(rank.steps) for rank in run.ranks), default=0)
    note = f"Means of the latest {latest} steps." if latest < len(run.steps) else ""
    yield bars("times", charts.times(shares), table=(heads, rows), note=note, half=False)
    if used := in_words(facts.used, run.prediction):
        yield text("peak", used[0], used[1:])
    if both := expected.beside(run, facts.shares):
        yield bars("expected", expected.chart(both), note=f"{both.sentence} {both.trust}")


def _pipeline(facts: Analysis) -> Iterator[Panel]:
    pipeline = facts.pipeline
    if pipeline is None:
        return
    drawn = [bar_chart(chart) for chart in charts.timetables(pipeline)]
    slow = max(
        range(len(pipeline.rows)),
        key=lambda row: sum(p.stop - p.start for p in pipeline.measured if p.row == row),
    )
    note = (
        f"Idle {percent(pipeline.planned_bubble)} planned, {percent(pipeline.measured_bubble)} real, and "
        f"{percent(pipeline.ideal_bubble)} with equal stages and free messages; busiest: {pipeline.rows[slow]}."
    )
    title = f"Pipeline timetable {pipeline.schedule}, step {pipeline.step}: planned above, real below"
    yield {"id": "pipeline", "kind": "bars", "title": title, "charts": drawn, "note": note, "half": False}


def _collectives(run: RunRecord, facts: Analysis) -> Iterator[Panel]:
    """Waiting apart from moving; nothing of a run of one rank."""
    rows = collectives.cells(collectives.table(run, facts.met))
    shown = {"heads": [*collectives.HEADS], "rows": rows, "numeric": 6, "open": True}
    note = "Waiting is until the last rank was there, moving from then until the call was over."
    if rows:
        yield {
            "id": "collectives", "kind": "bars", "title": "Collectives: waiting and moving", "charts": [],
            "table": shown, "note": note, "half": False,
        }  # fmt: skip


def _sizes(run: RunRecord) -> Iterator[Panel]:
    rows = [
        [r.axis, r.op, r.algorithm or "–", r.codec or "–", words.nbytes(r.nbytes)]
        for r in ledger(run)
        if r.nbytes
    ]
    if (chart := charts.sent(run)) is not None:
        yield bars("bytes", chart, table=(["axis", "operation", "algorithm", "codec", "per step"], rows))
    if (chart := charts.memory(run)) is not None:
        yield bars("memory", chart)


def _replicas(run: RunRecord) -> Iterator[Panel]:
    """How far apart the replicas are; nothing under a policy that keeps them together."""
    for at, chart in enumerate(instruments.curves([(run, "", "accent")])):
        yield lines(f"replicas-{at}", chart)
    if (chart := instruments.histogram(run)) is not None:
        yield bars("staleness", chart)


def _members(run: RunRecord) -> Panel:
    rows = membership.rows(membership.changes(run))
    chart = membership.chart(run)
    panel = {
        "id": "members",
        "kind": "bars",
        "title": "Who took part",
        "charts": [bar_chart(chart)] if chart else [],
    }
    shown = {"heads": [*membership.HEADS], "rows": rows, "numeric": 2, "open": True}
    return panel | {
        "table": shown,
        "half": True,
        "note": "" if rows else "Nothing has been written of starts and losses.",
    }


def _faults(run: RunRecord) -> Panel:
    """What went wrong: losses, errors, what could not be read."""
    said = [f"{run.error.get('code', 'error')}  {run.error.get('what', '')}"] if run.error else []
    said += [str(run.error[key]) for key in ("where", "likely", "try") if run.error.get(key)]
    lost = sum(line["event"] == "lost" for line in run.history)
    said += [f"{lost} loss{'es' * (lost > 1)} of ranks: see who took part."] if lost else []
    said += [f"{line}." for line in run.missing if "absent" not in line]
    return text(
        "faults", "Faults", said or ["None: no error, no rank lost, no damaged file."], bad=bool(said)
    )


def lines(name: str, chart: LineChart, half: bool = True) -> Panel:
    """Curves, with a table of some of their points."""
    heads = [chart.axis.name, *(line.name or "value" for line in chart.lines)]
    every = max(1, max(len(line.points) for line in chart.lines) // 12)
    known = [dict(line.points[::every] if len(line.points) > every else line.points) for line in chart.lines]
    places = sorted({x for points in known for x in points})[-24:]
    rows = [[words.count(x), *(words.number(points.get(x), 5) for points in known)] for x in places]
    return {
        "id": name, "kind": "lines", "title": chart.title, "charts": [line_chart(chart)], "half": half,
        "table": {"heads": heads, "rows": rows, "numeric": len(heads)},
    }  # fmt: skip


def bars(
    name: str, chart: BarChart, table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None, note: str = "",
    half: bool = True,
) -> Panel:  # fmt: skip
    """Rows of bars. table: (heads, rows) for who cannot see them; else the values that stand beside the rows."""
    heads, rows = table or (["name", "value"], [[row.name, row.value] for row in chart.rows])
    return {
        "id": name, "kind": "bars", "title": chart.title, "charts": [bar_chart(chart) | {"title": ""}], "note": note,
        "half": half, "table": {"heads": [*heads], "rows": [[*row] for row in rows], "numeric": len(heads) - 1},
    }  # fmt: skip


def text(name: str, title: str, said: Sequence[str], bad: bool = False) -> Panel:
    """Sentences."""
    return {"id": name, "kind": "text", "title": title, "said": [*said], "bad": bad, "half": True}


def line_chart(chart: LineChart) -> Panel:
    """A chart of curves as a browser gets it; points that are no numbers are left out."""
    return {
        "title": chart.title, "x": chart.x, "y": chart.y, "x_ticks": chart.x_ticks, "y_ticks": chart.y_ticks,
        "axis": asdict(chart.axis),
        "lines": [
            {"name": line.name, "colour": line.colour, "thick": line.thick, "dots": line.dots,
             "points": [[float(f"{x:.7g}"), float(f"{y:.6g}")] for x, y in picture.thin(line.points, _POINTS)
                        if math.isfinite(y)]}
            for line in chart.lines
        ],
    }  # fmt: skip


def bar_chart(chart: BarChart) -> Panel:
    """Rows of bars as a browser gets them."""
    return {
        "title": chart.title, "rows": [[row.name, row.small, row.value] for row in chart.rows],
        "bars": [
            [b.row, float(f"{b.start:.6g}"), float(f"{b.stop:.6g}"), b.colour, b.label, b.hover, int(b.thin)]
            for b in chart.bars
        ],
        "begin": chart.begin, "end": chart.end, "ticks": chart.ticks, "legend": dict(chart.legend),
        "tall": chart.tall, "row_height": chart.row_height,
    }  # fmt: skip
