"""A picture as a value: bars in rows, or curves. `pens` draw it; a page (`html`) or a sheet (`sheet`) frames it."""

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from unisono.spec import words

# Each colour on light and on dark paper; safe for colour-blind readers (after Okabe and Ito, 2008).
PALETTE: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#191c22"), "ground": ("#f3f4f6", "#101216"), "ink": ("#1a1d23", "#e9ebef"),
    "soft": ("#565d69", "#a6adb9"), "rule": ("#d9dce1", "#363b45"), "idle": ("#e9ebef", "#2a2f38"),
    "on_bar": ("#ffffff", "#0b0d10"), "black": ("#0b0d10", "#0b0d10"), "forward": ("#0072b2", "#58aee8"),
    "backward": ("#00785a", "#3dbd94"), "weight": ("#8a5a00", "#d9a441"), "comm_exposed": ("#c04f00", "#f08a4b"),
    "comm_hidden": ("#e2a12f", "#e2b04f"), "wait": ("#b9bfc9", "#5b6270"), "optim": ("#9a4f88", "#d48bc3"),
    "data": ("#56b4e9", "#a5dcff"), "other": ("#8a8371", "#aaa28d"), "accent": ("#0b5fa5", "#6fb7ee"),
    "accent_b": ("#c04f00", "#f08a4b"), "pale": ("#a9c6df", "#3a5a76"),
}  # fmt: skip
_INK_ON = {"data": "black", "wait": "ink"}
_CHARACTER = 0.0078  # of the plot's width: what a character of a label needs on a wide page
_PHONE = 5.5  # times as much on a phone, whose page hides what does not fit there

Point = tuple[float, float]
Tick = tuple[float, str]  # a position on an axis, and the words there


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """What the x of curves counts. whole: its marks are whole numbers. log: it goes by powers of ten; positions are
    logarithms, and points at 0 have no place."""

    name: str = "step"
    whole: bool = True
    log: bool = False


STEPS = ChartAxis()


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle on a row's axis. colour: a name of `PALETTE` or `#rrggbb`. hover: shown when pointed at.
    thin: along the foot of the row, under what is drawn there."""

    row: int
    start: float
    stop: float
    colour: str
    label: str = ""
    hover: str = ""
    thin: bool = False


@dataclass(frozen=True)
class BarRow:
    """What stands beside a row: its name, more of it in small letters, and a value on the right."""

    name: str
    small: str = ""
    value: str = ""


@dataclass(frozen=True)
class BarChart:
    """Rows of bars from `begin` to `end`. keys: colour to word; None means those of the parts of a step that occur."""

    title: str
    rows: Sequence[BarRow]
    bars: Sequence[Bar]
    end: float
    begin: float = 0.0
    ticks: Sequence[Tick] = ()
    keys: Mapping[str, str] | None = None
    tall: int = 28  # pixels of a row

    @property
    def row_height(self) -> int:
        return self.tall + (8 if any(bar.thin for bar in self.bars) else 0)

    @property
    def height(self) -> int:
        return self.row_height * len(self.rows)

    @property
    def legend(self) -> Mapping[str, str]:
        drawn = {bar.colour for bar in self.bars if bar.stop > bar.start}
        keys = words.PART_NAMES if self.keys is None else self.keys
        return {colour: word for colour, word in keys.items() if colour in drawn or colour.startswith("#")}


@dataclass(frozen=True)
class ChartLine:
    """One curve; its points are thinned when it is drawn."""

    name: str
    points: Sequence[Point]
    colour: str = "accent"
    thick: float = 2.0
    dots: bool = False


@dataclass(frozen=True)
class LineChart:
    """Curves over one pair of axes, each from its first to its second number."""

    title: str
    lines: Sequence[ChartLine]
    x: Point
    y: Point
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    axis: ChartAxis = STEPS

    @property
    def legend(self) -> Mapping[str, str]:
        return {line.colour: line.name for line in self.lines if line.name}


class Pen(Protocol):
    """Draws; coordinates are pixels from the upper left corner, colours names of `PALETTE` or `#rrggbb`."""

    def box(
        self, x: float, y: float, wide: float, tall: float, colour: str, edge: bool = False, hover: str = ""
    ) -> None: ...

    def line(self, points: Sequence[Point], colour: str, thick: float) -> None: ...

    def text(
        self,
        x: float,
        y: float,
        said: str,
        size: float,
        colour: str,
        anchor: str = "start",
        bold: bool = False,
        wide_only: bool = False,
    ) -> None:
        """y: the middle of the letters. anchor: start, middle or end of the text is at x. wide_only: not on phones."""
        ...  # fmt: skip


def draw_bars(pen: Pen, chart: BarChart, left: float, top: float, width: float) -> None:
    """Draw the rows of a chart, without what stands beside them."""
    scale, gap = width / ((chart.end - chart.begin) or 1.0), 2 if chart.tall >= 12 else 0.5
    for row in range(len(chart.rows)):
        pen.box(left, top + row * chart.row_height + gap, width, chart.tall - 2 * gap, "idle")
    for bar in chart.bars:
        start, stop = max(bar.start, chart.begin), min(bar.stop, chart.end)
        x, wide = left + (start - chart.begin) * scale, (stop - start) * scale
        y = top + bar.row * chart.row_height + (chart.tall - 1 if bar.thin else gap)
        tall = 6 if bar.thin else chart.tall - 2 * gap
        pen.box(x, y, wide, tall, bar.colour, edge=wide > 0.004 * width, hover=bar.hover)
        room = wide / (width * _CHARACTER * max(1.5, len(bar.label)))
        if bar.label and room >= 1:
            ink = _INK_ON.get(bar.colour, "on_bar")
            pen.text(x + wide / 2, y + tall / 2, bar.label, 12, ink, "middle", wide_only=room < _PHONE)


def draw_lines(
    pen: Pen, chart: LineChart, left: float, top: float, width: float, height: float, dots: bool = True
) -> None:
    """Draw the grid and the curves of a chart, without what stands beside them."""
    for at, _ in chart.y_ticks:
        y = top + height * (1 - share(at, chart.y))
        pen.line([(left, y), (left + width, y)], "rule", 1)
    for line in chart.lines:
        points = [
            (left + width * share(x, chart.x), top + height * (1 - share(y, chart.y)))
            for x, y in thin(line.points)
        ]
        if len(points) == 1:
            (x, y), half = points[0], 0.006 * width
            pen.line([(x - half, y), (x + half, y)], line.colour, line.thick)
        elif points:
            pen.line(points, line.colour, line.thick)
        for x, y in points if dots and line.dots else ():
            pen.box(x - 3.5, y - 3.5, 7, 7, line.colour)


def line_chart(
    title: str, lines: Sequence[ChartLine], *, zero: bool = False, axis: ChartAxis = STEPS
) -> LineChart | None:
    """A chart of curves, its axes chosen to fit; None without any point."""
    if axis.log:
        lines = [
            replace(line, points=[(math.log10(x), y) for x, y in line.points if x > 0]) for line in lines
        ]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x0, x1, low, high = min(xs), max(xs), (0.0 if zero else min(ys)), max(ys)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    x1, low, high = (x1 if x1 > x0 else x0 + 1), (0.0 if zero else low - margin), high + margin
    if axis.log:
        x_ticks = log_ticks(x0, x1)
    else:
        marks = [t for t in ticks(x0, x1) if not axis.whole or t == int(t)] or [x0]
        x_ticks = [(t, words.count(t)) for t in marks]
    y_ticks = [(t, words.count(t) if abs(t) >= 1000 else f"{t:.4g}") for t in ticks(low, high)]
    return LineChart(title, lines, (x0, x1), (low, high), x_ticks, y_ticks, axis)


def sized(title: str, sizes: Sequence[tuple[str, float, str]], colour: str = "accent") -> BarChart:
    """A bar for each (name, size, size in words)."""
    rows = [BarRow(name, value=said) for name, _, said in sizes]
    bars = [Bar(row, 0.0, size, colour) for row, (_, size, _) in enumerate(sizes)]
    return BarChart(title, rows, bars, max((size for _, size, _ in sizes), default=0.0) or 1.0)


def stacked(row: int, parts: Sequence[tuple[float, str, str, str]]) -> list[Bar]:
    """Bars end to end from zero on: (length, colour, label, hover) each; those of no length are left out."""
    ends = itertools.accumulate(length for length, *_ in parts)
    return [
        Bar(row, end - length, end, colour, label, hover)
        for end, (length, colour, label, hover) in zip(ends, parts, strict=True)
        if length > 0
    ]


def time_ticks(begin: float, end: float) -> list[Tick]:
    """Round times from `begin` to `end` seconds, but for the last stretch, whose words would hang over the edge."""
    marks = ticks(begin, end, 6)
    return [(at, words.seconds(at) if at else "0") for at in marks if at - begin <= 0.97 * (end - begin)]


def share(at: float, span: Point) -> float:
    """How far along `span` a position is: 0 at its begin, 1 at its end."""
    return (at - span[0]) / (span[1] - span[0])


def thin(points: Sequence[Point], limit: int = 800) -> list[Point]:
    """At most about `limit` points, the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) * 2 // limit)
    stretches = (points[i : i + size] for i in range(0, len(points), size))
    return [
        p for stretch in stretches for p in sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    ]  # fmt: skip


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Mean over `window` points around each (fewer at the ends): centred, so a falling curve is not lifted."""
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    half = max(1, window // 2)
    out: list[Point] = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        low, high = i - reach, i + reach + 1
        out.append((x, (sums[high] - sums[low]) / (high - low)))
    return out


def smooth_if_many(points: Sequence[Point]) -> list[Point]:
    """Of more than 100 points means over a fiftieth of them, and over 10 at least; fewer as they are."""
    return smooth(points, max(10, len(points) // 50)) if len(points) > 100 else list(points)


def log_ticks(low: float, high: float) -> list[Tick]:
    """Powers of ten from `low` to `high`, which are logarithms; also 2 and 5 of each where these are few."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    wanted = (1, 2, 5) if high - low < 2 else (1,)
    marks = [(d + math.log10(m), m, d) for d in decades for m in wanted]
    return [(at, words.count(m * 10.0**d)) for at, m, d in marks if low <= at <= high]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `wanted` of them."""
    raw = (high - low) / wanted
    if not raw >= sys.float_info.min:  # nothing, or too little for a power of ten
        return [low]
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]
