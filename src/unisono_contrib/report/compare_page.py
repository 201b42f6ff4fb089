"""The charts of a comparison of runs, and all of them on one sheet: every run has its colour in all of them.

The page is `dash.static`."""

from collections.abc import Callable, Sequence
from colorsys import hls_to_rgb
from dataclasses import replace
from pathlib import Path

from unisono.report import instruments, picture, sheet
from unisono.report.picture import Bar, BarChart, BarRow, ChartAxis, ChartLine, LineChart, Point
from unisono.spec import words
from unisono_contrib.report.compare import ComparedRun, Comparison, Progress
from unisono_contrib.report.compare_words import (
    Facts,
    bits_line,
    headline,
)

COLOURS = ("accent", "accent_b", "backward", "optim", "data", "weight", "ink", "wait")
"""Of up to so many runs; more have colours of the wheel."""
TITLES = {**instruments.TITLES, "codec_error": "Error of the codec's sum, over the norm of the plain sum"}
_FAR = 20.0  # times that a run sends or takes what another does, from where on an axis goes by powers of ten
_SECONDS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"), (1e-3, "milliseconds"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))
_PLAN = 44  # letters of a plan beside a bar

Spent = Callable[[ComparedRun, Progress], float]


def draw(comparison: Comparison, facts: Facts, path: Path) -> Path:
    """Draw the sheet; its first rows name the colours for all others. Raises OSError."""
    curves = [
        replace(chart, lines=[replace(line, name="") for line in chart.lines])
        for chart in (*losses(comparison), *replica_curves(comparison))
    ]
    charts = [
        [last_losses(facts)],
        *(curves[i : i + 2] for i in range(0, len(curves), 2)),
        target_bars(facts),
        *([chart] for chart in histograms(comparison)),
    ]
    return sheet.write(path, headline(facts), f"unisono compare · {bits_line(facts)}", charts)


def losses(comparison: Comparison) -> list[LineChart]:
    """The loss of all runs by step (by sample, where global batches differ), token, time and bytes sent."""
    unit = "token" if any(run.record.unit == "tokens" for run in comparison.runs) else "target"
    number: Spent = lambda run, at: at.step
    samples: Spent = lambda run, at: at.step * (run.batch or 1)
    by_step = (samples, ChartAxis("sample")) if comparison.by_samples else (number, ChartAxis())
    sent = ChartAxis(" sent by rank 0", whole=False)
    charts = [
        _losses(comparison, *by_step),
        _losses(comparison, lambda run, at: at.tokens, ChartAxis(unit)),
        _losses(comparison, lambda run, at: at.seconds, ChartAxis("", whole=False), _SECONDS),
        _losses(comparison, lambda run, at: at.nbytes, sent, _BYTES),
    ]
    return [chart for chart in charts if chart is not None]


def _losses(
    comparison: Comparison, spent: Spent, axis: ChartAxis, units: Sequence[tuple[float, str]] = ((1.0, ""),)
) -> LineChart | None:
    """units: (size, name), of which the largest is taken that two of go onto the axis; its name begins the axis's."""
    ends = [end for run in comparison.runs if (end := spent(run, run.progress[-1])) > 0]
    if not ends:
        return None
    size, unit = next((unit for unit in units if max(ends) >= 2 * unit[0]), units[-1])
    axis = replace(axis, name=unit + axis.name, log=not axis.whole and max(ends) > _FAR * min(ends))
    lines = [
        ChartLine(run.name, picture.smooth_if_many(_points(run, spent, size)), colour)
        for run, colour in zip(comparison.runs, colours(comparison.runs), strict=True)
    ]
    return picture.line_chart(f"Loss, by {axis.name}", lines, axis=axis)


def _points(run: ComparedRun, spent: Spent, size: float) -> list[Point]:
    """(what a run has spent, in units of `size`; its loss) after each step whose loss is a number."""
    return [(spent(run, at) / size, at.loss) for at in run.progress if at.loss is not None]


def last_losses(facts: Facts) -> BarChart:
    """A bar for each run, in its colour: its last loss."""
    return _bars("Last loss", facts, "loss", lambda loss: f"{loss:.5g}", plans=True)


def target_bars(facts: Facts) -> list[BarChart]:
    """What each run takes until it comes to the target, in seconds and in bytes; nothing where none of them does."""
    if facts["target_loss"] is None:
        return []
    what = f"until a loss of {facts['target_loss']:.4g}"
    return [
        _bars(f"Time {what}", facts, "seconds_to_target", words.seconds),
        _bars(f"Bytes sent by rank 0 {what}", facts, "bytes_to_target", words.nbytes),
    ]


def _bars(title: str, facts: Facts, key: str, said: Callable[[float], str], plans: bool = False) -> BarChart:
    runs, drawn = facts["runs"], colours(facts["runs"])
    bars = [Bar(row, 0.0, max(0.0, run[key] or 0.0), drawn[row]) for row, run in enumerate(runs)]
    named = [
        BarRow(run["name"], _cut(run["plan"]) if plans else "", "–" if run[key] is None else said(run[key]))
        for run in runs
    ]
    return BarChart(title, named, bars, max(bar.stop for bar in bars) or 1.0, keys={})


def _cut(text: str) -> str:
    return text if len(text) <= _PLAN else f"{text[: _PLAN - 3]}..."


def replica_curves(comparison: Comparison) -> list[LineChart]:
    """Staleness, consensus distance and the like of the runs that write them down, by step."""
    drawn = [
        (run.record, run.name, colour)
        for run, colour in zip(comparison.runs, colours(comparison.runs), strict=True)
    ]
    return instruments.curves(drawn, TITLES)


def histograms(comparison: Comparison) -> list[BarChart]:
    """A histogram of staleness for each run that counts it."""
    charts = [
        instruments.histogram(run.record, f"{run.name}: contributions by their staleness", colour)
        for run, colour in zip(comparison.runs, colours(comparison.runs), strict=True)
    ]
    return [chart for chart in charts if chart is not None]


def colours(runs: Sequence[object]) -> list[str]:
    """A colour for each run."""
    count = len(runs)
    return list(COLOURS[:count]) if count <= len(COLOURS) else [_hue(i / count, i % 2) for i in range(count)]


def _hue(turn: float, dark: int) -> str:
    """A colour of the wheel, visible on light and on dark paper; neighbours differ in lightness too."""
    channels = hls_to_rgb(turn, 0.38 + 0.2 * (not dark), 0.7)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
