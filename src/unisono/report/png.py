"""`report.png`: the page's main pictures on one sheet, for a chat window, an issue or a README."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.report import chart, sheet, words
from unisono.report.analyse import (
    PARTS,
    Pipeline,
    TimeShares,
    chosen,
    grouped,
    judge,
    percent,
    pipeline_of,
    shares,
    spans_of,
    traced_step,
)
from unisono.report.collect import RunRecord
from unisono.report.expected import Beside, apart, beside, group

_ROWS = 16


def write(run: RunRecord, path: str | Path) -> Path:
    """Draw the sheet (1600 pixels wide), whole or not at all. Raises OSError."""
    found, pipeline = shares(run), pipeline_of(run)
    verdict = judge(run, found, pipeline)
    step = traced_step(run.traces)
    spanned = any(spans_of(trace, step) for trace in run.traces)
    ranks = min(_ROWS, max(1, len(found)))
    heights = [2.9]
    heights += [0.9 + 0.34 * ranks] if found else []
    both = beside(run, found)
    heights += [0.9 + 0.34 * 2] if both else []
    heights += [0.9 + 0.34 * min(_ROWS, len(run.traces))] if spanned else []
    heights += [0.8 + 0.34 * len(pipeline.rows)] * 2 if pipeline else []

    figure = sheet.blank(1.7 + sum(heights) + 0.5 * len(heights))
    total = figure.get_figheight()
    headline = textwrap.fill(verdict.sentence, 104)
    figure.text(0.025, 1 - 0.3 / total, headline, fontsize=17, weight="bold", color=sheet.INK, va="top")
    said = f"unisono · {run.name}" + (f" · {run.plan}" if run.plan else "")
    below = 0.3 + 0.29 * (1 + headline.count("\n")) + 0.1
    figure.text(
        0.025, 1 - below / total, textwrap.shorten(said, 180), fontsize=11, color=sheet.SOFT, va="top"
    )
    edges = {"left": 0.115, "right": 0.975, "top": 1 - (below + 0.75) / total, "bottom": 0.45 / total}
    gap = 0.78 * len(heights) / sum(heights)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights, hspace=gap, wspace=0.13, **edges)
    _loss(figure.add_subplot(grid[0, 0]), run)
    _speed(figure.add_subplot(grid[0, 1]), run)
    at = 1
    if found:
        _times(figure.add_subplot(grid[at, :]), grouped(found, _ROWS))
        at += 1
    if both:
        _expected(figure.add_subplot(grid[at, :]), both)
        at += 1
    if spanned:
        _timeline(figure.add_subplot(grid[at, :]), run, step)
        at += 1
    if pipeline:
        _timetables((figure.add_subplot(grid[at, :]), figure.add_subplot(grid[at + 1, :])), pipeline)
    return sheet.save(figure, path)


def _loss(axes: Any, run: RunRecord) -> None:
    points = [(r["step"], r["loss"]) for r in run.steps if words.is_number(r.get("loss"))]
    validated = run.validation
    sheet.frame(axes, "Loss, by step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(points) > 100:
        axes.plot(*_columns(chart.thin(points)), color=sheet.COLOURS["forward"], lw=0.8, alpha=0.35)
        points = chart.smooth(points, max(10, len(points) // 50))
    if points:
        axes.plot(*_columns(points), color=sheet.COLOURS["forward"], lw=2, label="training")
    if validated:
        axes.plot(
            *_columns(validated),
            color=sheet.COLOURS["comm_exposed"],
            lw=2,
            marker="o",
            ms=4,
            label="validation",
        )
    if points or validated:
        axes.legend(frameon=False, fontsize=11, loc="upper right")
    else:
        _nothing(axes)


def _speed(axes: Any, run: RunRecord) -> None:
    points = [(r["step"], r["tokens_per_s"]) for r in run.steps if words.is_number(r.get("tokens_per_s"))][1:]
    sheet.frame(axes, "Tokens per second, by step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if points:
        axes.plot(*_columns(chart.thin(points)), color=sheet.COLOURS["forward"], lw=1.6)
        axes.set_ylim(0, 1.12 * max(y for _, y in points))
        axes.yaxis.set_major_formatter(lambda value, _: words.count(value))
    else:
        _nothing(axes)


def _times(axes: Any, found: Sequence[TimeShares]) -> None:
    sheet.frame(axes, "Where the time of a step goes", grid=False)
    longest = max(share.wall for share in found)
    for row, share in enumerate(found):
        left = 0.0
        for part in PARTS:
            wide = share.parts.get(part, 0.0)
            if wide <= 0:
                continue
            axes.barh(
                row, wide, left=left, height=0.78, color=sheet.COLOURS[part], label=words.PART_NAMES[part]
            )
            if wide > 0.035 * longest:
                ink = sheet.INK if part in ("wait", "data") else "white"
                said = percent(wide / share.wall)
                axes.text(left + wide / 2, row, said, ha="center", va="center", fontsize=10, color=ink)
            left += wide
    sheet.rows(axes, [f"{share.name}  {share.place}".strip() for share in found])
    axes.set_xlim(0, longest)
    sheet.time_axis(axes)
    sheet.legend(axes)


def _expected(axes: Any, both: Beside) -> None:
    off = apart(both.predicted, both.measured)
    where = "measured on this machine" if both.calibrated else f"of the built-in cluster {both.cluster}"
    sheet.frame(axes, f"Predicted and measured: {off}, with prices {where}", grid=False)
    for row, seconds in enumerate(([s.predicted for s in both.lines], [s.measured for s in both.lines])):
        left = 0.0
        for line, wide in zip(both.lines, seconds, strict=True):
            axes.barh(row, wide, left=left, height=0.78, color=sheet.COLOURS[line.colour])
            share = wide / max(both.predicted, both.measured)
            if share > 0.06:
                ink = sheet.INK if line.colour == "wait" else "white"
                said = words.seconds(wide)
                said = f"{group(line)} {said}" if share > 0.02 + 0.008 * len(group(line)) else said
                axes.text(left + wide / 2, row, said, ha="center", va="center", fontsize=10, color=ink)
            left += wide
    sheet.rows(axes, ["predicted", "measured"])
    axes.set_xlim(0, max(both.predicted, both.measured))
    sheet.time_axis(axes)


def _timeline(axes: Any, run: RunRecord, step: int | None) -> None:
    sheet.frame(axes, f"One step: {step}" if step is not None else "One step", grid=False)
    traces = chosen(run.traces, _ROWS)
    begin = min(span.start_ns for trace in traces for span in spans_of(trace, step))
    end = max(span.stop_ns for trace in traces for span in spans_of(trace, step))
    length = (end - begin) * 1e-9
    for row, trace in enumerate(traces):
        axes.barh(row, length, height=0.78, color=sheet.IDLE)
        for span in spans_of(trace, step):
            hidden = span.kind == "comm" and not span.tags.get("exposed", True)
            part = {"comm": "comm_hidden" if hidden else "comm_exposed"}.get(span.kind, span.kind)
            part = part if part in sheet.COLOURS else "other"
            start, wide = (span.start_ns - begin) * 1e-9, (span.stop_ns - span.start_ns) * 1e-9
            place, tall = (row + 0.45, 0.13) if hidden else (row, 0.78)
            edge = {"edgecolor": "white", "linewidth": 0.5} if wide > 0.004 * length else {}
            axes.barh(
                place,
                wide,
                left=start,
                height=tall,
                color=sheet.COLOURS[part],
                label=words.PART_NAMES[part],
                **edge,
            )
            if part in ("forward", "backward") and wide > 0.015 * length and "micro" in span.tags:
                axes.text(
                    start + wide / 2,
                    row,
                    span.tags["micro"],
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white",
                )
    places = {facts.rank: facts.place for facts in run.ranks}
    sheet.rows(axes, [f"rank {trace.rank}  {places.get(trace.rank, '')}".strip() for trace in traces])
    axes.set_xlim(0, length)
    sheet.time_axis(axes)
    sheet.legend(axes)


def _timetables(both: Sequence[Any], pipeline: Pipeline) -> None:
    until = max(p.stop for p in (*pipeline.planned, *pipeline.measured))
    cases = (
        ("planned", pipeline.planned, pipeline.planned_bubble),
        ("measured", pipeline.measured, pipeline.measured_bubble),
    )
    for axes, (word, placed, idle) in zip(both, cases, strict=True):
        sheet.frame(
            axes, f"Pipeline timetable {pipeline.schedule}, {word}: bubble {percent(idle)}", grid=False
        )
        sheet.timetable(axes, placed, until)
        sheet.rows(axes, list(pipeline.rows))
        axes.set_xlim(0, until)
        sheet.time_axis(axes)


def _nothing(axes: Any) -> None:
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=sheet.SOFT, fontsize=12)
    axes.set_xticks([])
    axes.set_yticks([])


def _columns(points: Sequence[chart.Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
