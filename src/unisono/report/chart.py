"""Charts as HTML and inline SVG that fit any width: lines, stacked bars, a heat map.

Lines are stretched with their box while words stand beside them as HTML, so nothing is squeezed on a phone.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from unisono.report import words
from unisono.report.analyse import PARTS, TimeShares, percent

Point = tuple[float, float]


@dataclass(frozen=True)
class ChartLine:
    """One curve; `style` is a class of the page's style sheet."""

    name: str
    points: Sequence[Point]
    style: str = "line-a"


def thin(points: Sequence[Point], limit: int = 800) -> list[Point]:
    """At most about `limit` points, the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) * 2 // limit)
    kept: list[Point] = []
    for i in range(0, len(points), size):
        stretch = points[i : i + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


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


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `wanted` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(lines: Sequence[ChartLine], label: str, *, unit: str = "", zero: bool = False) -> str:
    """A chart of curves over the step, with a readout under the pointer; "" without any point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x0, x1 = min(xs), max(xs)
    y0, y1 = (0.0 if zero else min(ys)), max(ys)
    margin = 0.06 * (y1 - y0) or abs(y1) * 0.1 or 1.0
    y0, y1 = (0.0 if zero else y0 - margin), y1 + margin
    x1 = x1 if x1 > x0 else x0 + 1

    def place(x: float, y: float) -> tuple[float, float]:
        return 1000 * (x - x0) / (x1 - x0), 300 * (y1 - y) / (y1 - y0)

    y_ticks, x_ticks = ticks(y0, y1), [t for t in ticks(x0, x1) if t == int(t)] or [x0]
    drawn = [f'<path class="grid" d="M0 {place(x0, t)[1]:.1f}H1000"/>' for t in y_ticks]
    for line in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in thin(line.points)))
        if len(line.points) == 1:
            x, y = place(*line.points[0])
            path = f"{x - 6:.1f},{y:.1f} {x + 6:.1f},{y:.1f}"
        drawn.append(f'<polyline class="{line.style}" points="{path}"/>')
    marks = [f'<span class="y" style="top:{place(x0, t)[1] / 3:.2f}%">{_tick(t)}</span>' for t in y_ticks]
    marks += [
        f'<span class="x" style="left:{place(t, y0)[0] / 10:.2f}%">{words.count(t)}</span>' for t in x_ticks
    ]
    data = {
        "x": [x0, x1],
        "unit": unit,
        "lines": [
            {"name": line.name, "points": [[round(x, 2), float(f"{y:.5g}")] for x, y in thin(line.points)]}
            for line in lines
        ],
    }
    legend = "".join(
        f'<span class="key"><i class="{line.style}"></i>{escape(line.name)}</span>' for line in lines
    )
    return (
        f'<figure class="chart"><div class="legend">{legend}<output></output></div>'
        f'<div class="plot" data-chart="{escape(json.dumps(data, separators=(",", ":")))}">'
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(drawn)}</svg>{''.join(marks)}<div class='cursor'></div></div>"
        f'<div class="axis">step</div></figure>'
    )


def stacked_bars(found: Sequence[TimeShares]) -> str:
    """One bar per rank, as long as its step, cut into its parts; hidden communication as a line beneath."""
    longest = max((share.wall for share in found), default=0.0) or 1.0
    rows = []
    for share in found:
        cuts = "".join(
            f'<span class="part {part}" style="width:{100 * share.parts[part] / longest:.3f}%"'
            f' data-tip="{escape(_part_tip(share, part))}">'
            + (
                f"<b>{percent(share.parts[part] / share.wall)}</b>"
                if share.parts[part] / longest >= 0.07
                else ""
            )
            + "</span>"
            for part in PARTS
            if share.parts.get(part, 0.0) > 0
        )
        hidden = share.parts.get("comm_hidden", 0.0)
        beneath = (
            f'<span class="beneath" style="width:{min(100.0, 100 * hidden / longest):.3f}%"'
            f' data-tip="{escape(_part_tip(share, "comm_hidden"))}"></span>'
            if hidden > 0
            else ""
        )
        rows.append(
            f'<div class="row"><span class="name">{escape(share.name)}<small>{escape(share.place)}</small>'
            "</span>"
            f'<span class="bar"><span class="stack">{cuts}</span>{beneath}</span>'
            f'<span class="value">{words.seconds(share.wall)}</span></div>'
        )
    used = [part for part in (*PARTS, "comm_hidden") if any(s.parts.get(part, 0.0) > 0 for s in found)]
    return legend(used) + f'<div class="bars">{"".join(rows)}</div>'


def legend(parts: Sequence[str]) -> str:
    """What the colours of a step's parts mean."""
    keys = (f'<span class="key"><i class="part {p}"></i>{escape(words.PART_NAMES[p])}</span>' for p in parts)
    return f'<div class="legend">{"".join(keys)}</div>'


def plain_bars(rows: Sequence[tuple[str, float]], label: Mapping[str, str]) -> str:
    """One bar per row in one colour; `label` has the words for each row's value."""
    longest = max((value for _, value in rows), default=0.0) or 1.0
    drawn = (
        f'<div class="row"><span class="name">{escape(name)}</span>'
        '<span class="bar"><span class="stack">'
        f'<span class="part size" style="width:{100 * value / longest:.2f}%"></span></span></span>'
        f'<span class="value">{escape(label[name])}</span></div>'
        for name, value in rows
    )
    return f'<div class="bars">{"".join(drawn)}</div>'


def waterfall(steps: Sequence[tuple[str, float, str]], total: str) -> str:
    """(what, seconds, part): each bar begins where the one before it ends, and the last, `total`, is all of them."""
    whole = sum(seconds for _, seconds, _ in steps)
    ends = list(itertools.accumulate(seconds for _, seconds, _ in steps))
    longest = max([*ends, 0.0]) or 1.0
    rows = [
        (what, min(end, end - seconds), abs(seconds), seconds, part)
        for (what, seconds, part), end in zip(steps, ends, strict=True)
    ]
    rows.append((total, 0.0, whole, whole, "size"))
    drawn = (
        f'<div class="row"><span class="name">{escape(what)}</span><span class="bar"><span class="stack">'
        f'<span class="part {part}" style="margin-left:{100 * left / longest:.3f}%;width:{100 * wide / longest:.3f}%"'
        f' data-tip="{escape(what)}: {percent(seconds / (whole or 1.0))} of the step"></span></span></span>'
        f'<span class="value">{"-" if seconds < 0 else ""}{words.seconds(wide)}</span></div>'
        for what, left, wide, seconds, part in rows
    )
    return f'<div class="bars waterfall">{"".join(drawn)}</div>'


def heat_map(rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[str], label: str) -> str:
    """Cells from 1 (as the median rank, pale) to 2 and above (dark); None is left blank."""
    if not rows or not columns:
        return ""
    wide, tall = 100 / len(columns), max(6, min(20, 480 // len(rows)))
    cells = [
        f'<rect x="{i * wide:.3f}%" y="{r * tall}" width="{wide + 0.03:.3f}%" height="{tall - 1}"'
        f' style="fill:{_heat(value)}" data-tip="{escape(name)}, step {columns[i]}: {value:.2f}"/>'
        for r, (name, values) in enumerate(rows)
        for i, value in enumerate(values)
        if value is not None
    ]
    names = "".join(
        f'<span style="height:{tall}px">{escape(name) if tall >= 12 or r % 4 == 0 else ""}</span>'
        for r, (name, _) in enumerate(rows)
    )
    scale = "".join(f'<i style="background:{_heat(1 + i / 10)}"></i>' for i in range(11))
    return (
        f'<div class="rows"><div class="names">{names}</div>'
        f'<svg width="100%" height="{len(rows) * tall}" role="img" aria-label="{escape(label)}">'
        f"{''.join(cells)}</svg></div>"
        f'<div class="ends"><span>step {columns[0].split()[0]}</span><span>step {columns[-1].split()[-1]}</span></div>'
        f'<div class="legend scale">as the median rank {scale} twice as long</div>'
    )


def time_axis(length: float, begin: float = 0.0) -> str:
    """Round times over `length` seconds from `begin` on, set under the bars they measure."""
    marks = (
        f'<span style="left:{100 * (at - begin) / length:.2f}%">{words.seconds(at) if at else "0"}</span>'
        for at in ticks(begin, begin + length, 6)
        if at - begin <= 0.97 * length
    )
    return f'<div class="times">{"".join(marks)}</div>'


def _heat(value: float) -> str:
    """Pale yellow to dark blue, in even steps of lightness: readable without colour."""
    stops = ((255, 247, 205), (199, 218, 176), (90, 172, 178), (37, 104, 160), (22, 30, 90))
    at = min(1.0, max(0.0, value - 1.0)) * (len(stops) - 1)
    low = min(int(at), len(stops) - 2)
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(stops[low], stops[low + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _part_tip(share: TimeShares, part: str) -> str:
    value = share.parts[part]
    spent, fraction = words.seconds(value), percent(value / share.wall)
    return f"{share.name}: {words.PART_NAMES[part]} {spent}, {fraction} of a step"


def _tick(value: float) -> str:
    return words.count(value) if abs(value) >= 1000 else f"{value:.4g}"


def details(summary: str, inside: str) -> str:
    """Something to open."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: int = 0, first_is_text: bool = False
) -> str:
    """A table whose last `numeric` columns are figures."""

    def cell(tag: str, i: int, width: int, text: str) -> str:
        figure = i >= width - numeric and not (first_is_text and i == 0)
        return f"<{tag}{' class=n' if figure else ''}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, len(heads), text) for i, text in enumerate(heads))
    lines = ("".join(cell("td", i, len(row), text) for i, text in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
