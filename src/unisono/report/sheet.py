"""Charts on one sheet, 1600 pixels wide, light: for a chat window, an issue or a README."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from unisono.observe.files import write_whole
from unisono.report.pens import PngPen, SvgPen
from unisono.report.picture import BarChart, LineChart, Pen, draw_bars, draw_lines, share

WIDTH, _MARGIN, _BETWEEN = 1600, 40, 56
_CURVES = 210  # pixels of a plot of curves
_LETTER = 0.53  # of its size, the width of a letter in the mean

Chart = BarChart | LineChart


def write(path: str | Path, headline: str, said: str, rows: Sequence[Sequence[Chart | None]]) -> Path:
    """Draw rows of charts under a headline, whole or not at all: as SVG if `path` ends so, else PNG. Raises OSError."""
    charts = [[chart for chart in row if chart is not None] for row in rows]
    charts = [row for row in charts if row]
    lines = textwrap.wrap(headline, 118)
    top = 34 + 32 * len(lines) + 48
    height = top + sum(max(_height(c, _width(row)) for c in row) for row in charts)
    pen = SvgPen(page=False) if Path(path).suffix == ".svg" else PngPen(WIDTH, height)
    for at, line in enumerate(lines):
        pen.text(_MARGIN, 42 + 32 * at, line, 24, "ink", bold=True)
    pen.text(_MARGIN, 44 + 32 * len(lines), textwrap.shorten(said, 200), 15, "soft")
    for row in charts:
        width = _width(row)
        for at, chart in enumerate(row):
            _chart(pen, chart, _MARGIN + at * (width + _BETWEEN), top, width)
        top += max(_height(c, width) for c in row)
    return write_whole(path, pen.file(WIDTH, height))


def _width(row: Sequence[Chart]) -> float:
    return (WIDTH - 2 * _MARGIN - _BETWEEN * (len(row) - 1)) / len(row)


def _height(chart: Chart, width: float) -> int:
    plot = chart.height if isinstance(chart, BarChart) else _CURVES
    axis = 24 if isinstance(chart, LineChart) or chart.ticks else 0
    return _head(chart, width) + plot + axis + 30


def _head(chart: Chart, width: float) -> int:
    """Pixels of the title, and of the legend where that does not fit beside it."""
    return 36 if _long(chart.title, 18) + _legend_width(chart) + 60 <= width else 64


def _long(said: str, size: float) -> float:
    return _LETTER * size * len(said)


def _legend_width(chart: Chart) -> float:
    return sum(_long(word, 14) + 42 for word in chart.legend.values())


def _chart(pen: Pen, chart: Chart, left: float, top: float, width: float) -> None:
    head = _head(chart, width)
    pen.text(left, top + 10, chart.title, 18, "ink", bold=True)
    at, below = left + width - _legend_width(chart), top + (10 if head == 36 else 40)
    for colour, word in chart.legend.items():
        pen.box(at + 16, below - 6, 12, 12, colour)
        pen.text(at + 34, below, word, 14, "soft")
        at += _long(word, 14) + 42
    top += head
    if isinstance(chart, LineChart):
        _lines(pen, chart, left + 62, top, width - 62)
        return
    gutter = min(0.3 * width, max(_long(f"{row.name}  {row.small}".strip(), 14) for row in chart.rows) + 14)
    values = max(_long(row.value, 14) for row in chart.rows)
    plot = width - gutter - (values + 12 if values else 0)
    for at, row in enumerate(chart.rows):
        middle = top + at * chart.row_height + chart.tall / 2
        pen.text(left + gutter - 12, middle, f"{row.name}  {row.small}".strip(), 14, "ink", "end")
        if row.value:
            pen.text(left + width, middle, row.value, 14, "ink", "end")
    draw_bars(pen, chart, left + gutter, top, plot)
    for at, said in chart.ticks:
        x = left + gutter + plot * share(at, (chart.begin, chart.end))
        pen.text(x, top + chart.height + 13, said, 14, "soft", "start" if at == chart.begin else "middle")


def _lines(pen: Pen, chart: LineChart, left: float, top: float, width: float) -> None:
    draw_lines(pen, chart, left, top, width, _CURVES)
    for at, said in chart.y_ticks:
        pen.text(left - 10, top + _CURVES * (1 - share(at, chart.y)), said, 14, "soft", "end")
    for at, said in chart.x_ticks:
        pen.text(left + width * share(at, chart.x), top + _CURVES + 14, said, 14, "soft", "middle")
