"""A scaling study as one picture: speed, efficiency, and where the time of each point goes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.report import picture, sheet
from unisono.report.picture import Bar, BarChart, BarRow, ChartLine, LineChart, Point, Tick
from unisono.spec import words
from unisono.spec.words import percent

# Parts of a step, by how their names in the waterfall begin; what begins otherwise is "other".
_PARTS = (
    ("arithmetic at peak", "ideal", "forward"),
    ("below peak, recomputation", "products|attention|computed", "backward"),
    ("other kernels, optimiser", "other kernels|optimiser", "data"),
    ("exposed communication", "exposed", "comm_exposed"),
    ("bubble, uneven stages", "bubble|uneven|straggler", "wait"),
    ("host, fixed", "waiting|fixed|data", "optim"),
    ("other", "", "other"),
)


def write(study: Mapping[str, Any], title: str, path: str | Path) -> Path:
    """Draw the object of `planner.sweep.as_json`, whole or not at all. The suffix, .png or .svg, is the format.

    Raises OSError.
    """
    points = [point for point in study["points"] if point["plan"] is not None]
    says = study["says"][:1].upper() + study["says"][1:]
    grows = study["key"] in ("devices", "nodes")
    curves = [_speed(points, study, grows), _efficiency(points, study, grows)] if points else []
    rows = [curves, [parts(points)] if points else []]
    return sheet.write(path, says, f"unisono simulate · {title}", rows)


def _speed(points: Sequence[Mapping[str, Any]], study: Mapping[str, Any], grows: bool) -> LineChart:
    """Tokens per second; both axes in doublings where devices are added, so that a straight line is the ideal."""
    xs, ys = [math.log2(p["value"]) for p in points], [p["tokens_per_s"] for p in points]
    title = f"Tokens per second, by {_noun(study)}"
    if not grows:
        high = 1.12 * max(ys)
        y_ticks = [(t, words.count(t)) for t in picture.ticks(0.0, high)]
        return _chart(title, [ChartLine("the best plan", list(zip(xs, ys, strict=True)), "forward", 2.2, True)],
                      (0.0, high), y_ticks, points)  # fmt: skip
    ideal = [points[0]["tokens_per_s"] * p["value"] / points[0]["value"] for p in points]
    lines = [
        ChartLine("as the first point", [(x, math.log10(y)) for x, y in zip(xs, ideal, strict=True)], "wait"),
        ChartLine("the best plan", [(x, math.log10(y)) for x, y in zip(xs, ys, strict=True)], "forward", 2.2, True),
    ]  # fmt: skip
    low, high = math.log10(min(*ys, *ideal)) - 0.1, math.log10(max(*ys, *ideal)) + 0.1
    return _chart(title, lines, (low, high), picture.log_ticks(low, high), points)


def _efficiency(points: Sequence[Mapping[str, Any]], study: Mapping[str, Any], grows: bool) -> LineChart:
    what = "Efficiency beside the first point" if grows else "Speed beside the first point"
    xs = [math.log2(p["value"]) for p in points]
    ys, mfu = ([100 * p[key] for p in points] for key in ("efficiency", "mfu"))
    name = "efficiency" if grows else "speed"
    lines = [
        ChartLine(name, list(zip(xs, ys, strict=True)), "forward", 2.2, dots=True),
        ChartLine("MFU", list(zip(xs, mfu, strict=True)), "backward", 1.8, dots=True),
    ]
    high = 1.1 * max(100.0, *ys)
    if grows:
        lines.append(ChartLine("half", [(xs[0], 50.0), (xs[-1], 50.0)], "comm_hidden", 1.2))
    nothing = [math.log2(p["value"]) for p in study["points"] if p["plan"] is None]
    lines += [ChartLine("no plan fits", [(x, 0.0), (x, high)], "comm_exposed", 1.2) for x in nothing]
    y_ticks = [(t, f"{t:.0f} %") for t in picture.ticks(0.0, high)]
    return _chart(f"{what}, and share of peak (MFU)", lines, (0.0, high), y_ticks, study["points"])


def _chart(
    title: str, lines: Sequence[ChartLine], y: Point, y_ticks: Sequence[Tick], points: Sequence[Mapping[str, Any]]
) -> LineChart:  # fmt: skip
    ticks = [(math.log2(p["value"]), _words(p["value"])) for p in points]
    ends = min(ticks)[0], max(ticks)[0]
    return LineChart(title, lines, (ends[0] - 0.1, ends[1] + 0.1), y, ticks, y_ticks)


def parts(points: Sequence[Mapping[str, Any]]) -> BarChart:
    """One row for each point: its value, its mesh, and the shares of its step."""
    bars: list[Bar] = []
    for row, point in enumerate(points):
        cuts = [(share(point, begins), colour, name) for name, begins, colour in _PARTS]
        shown = [(s, colour, percent(s), f"{name}: {percent(s)}") for s, colour, name in cuts if s >= 5e-4]
        bars += picture.stacked(row, shown)
    rows = [BarRow(_words(p["value"]), _mesh(p["plan"]), words.seconds(p["step_s"])) for p in points]
    return BarChart("Where a step goes", rows, bars, 1.0, keys={c: name for name, _, c in _PARTS})


def share(point: Mapping[str, Any], begins: str) -> float:
    """Of a step; negative parts (a shorter chain than the busiest) are none."""
    total = sum(max(0.0, part["seconds"]) for part in point["waterfall"])
    known = tuple(word for _, starts, _ in _PARTS for word in starts.split("|") if word)
    matching = (
        part["seconds"]
        for part in point["waterfall"]
        if (
            part["what"].startswith(tuple(begins.split("|")))
            if begins
            else not part["what"].startswith(known)
        )
    )
    return sum(max(0.0, seconds) for seconds in matching) / total


def _mesh(plan: str) -> str:
    axes = ("dp", "shard", "tp", "cp", "ep", "pp")
    return " ".join(word for word in plan.split() if word.partition("=")[0] in axes)


def _noun(study: Mapping[str, Any]) -> str:
    noun = str(study["key"]).replace("_", " ")
    return f"{noun}, weak scaling" if study["weak"] else noun


def _words(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
