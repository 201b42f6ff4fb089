"""The parts of a page that needs nobody: one file, no request, no library, no network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from unisono.report.pens import SvgPen
from unisono.report.picture import PALETTE, BarChart, LineChart, draw_bars, draw_lines, share, thin

# The page may not fetch anything, and the browser is told so.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, body: Sequence[str]) -> str:
    """A page of the report's look around its sections; it asks nobody for anything."""
    here = Path(__file__)
    css = here.with_name("page.css").read_text(encoding="utf-8")
    script = here.with_name("page.js").read_text(encoding="utf-8")
    light, dark = ("".join(f"--{name}:{both[i]};" for name, both in PALETTE.items()) for i in (0, 1))
    colours = f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{colours}{css}</style></head><body><main>{''.join(body)}</main>"
        f'<div id="tip" role="status"></div><script>{script}</script></body></html>\n'
    )


def head(run: str, verdict: str, advice: str) -> str:
    """The top of a page: what it is about, one sentence, what to do about it."""
    more = f'<p class="advice">{escape(advice)}</p>' if advice else ""
    return f'<header><p class="run">{escape(run)}</p><h1 data-testid="verdict">{escape(verdict)}</h1>{more}</header>'


def section(testid: str, title: str, *inside: str) -> str:
    return f'<section data-testid="{testid}"><h2>{escape(title)}</h2>{"".join(inside)}</section>'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def pair(*inside: str) -> str:
    """Sections beside each other where the window is wide."""
    return f'<div class="pair">{"".join(inside)}</div>'


def tiles(facts: Sequence[tuple[str, str, str]], style: str = "tiles") -> str:
    """(name, value, more) as a row of boxes; style `facts`: a list of long values."""

    def tile(name: str, value: str, more: str) -> str:
        small = f"<small>{escape(more)}</small>" if style == "tiles" else ""
        return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"

    drawn = "".join(tile(*fact) for fact in facts)
    return f'<dl class="{style}" data-testid="{style}">{drawn}</dl>' if facts else ""


def bars(chart: BarChart) -> str:
    """Rows of bars that fit any window: names and values as HTML beside an SVG whose x is in percent."""
    pen = SvgPen(page=True, unit="%")
    draw_bars(pen, chart, 0.0, 0.0, 100.0)
    style = f'style="height:{chart.row_height}px;font-size:{min(13, chart.tall)}px"'
    names, values = (
        "".join(f"<span {style}>{escape(said)}{more}</span>" for said, more in column)
        for column in (
            [(row.name, f"<small>{escape(row.small)}</small>" if row.small else "") for row in chart.rows],
            [(row.value, "") for row in chart.rows],
        )
    )
    right = f'<div class="names values">{values}</div>' if any(row.value for row in chart.rows) else ""
    marks = "".join(
        f'<span style="left:{100 * share(at, (chart.begin, chart.end)):.2f}%">{escape(said)}</span>'
        for at, said in chart.ticks
    )
    axis = f'<div class="times">{marks}</div>' if marks else ""
    return (
        f'{_legend(chart.legend, "")}<div class="rows"><div class="names">{names}</div>'
        f'<svg class="bars" role="img" aria-label="{escape(chart.title)}" width="100%" height="{chart.height}">'
        f"{''.join(pen.parts)}</svg>{right}{axis}</div>"
    )


def curves(chart: LineChart) -> str:
    """Curves that are stretched with their box, words that are not, and a readout under the pointer."""
    pen = SvgPen(page=True)
    draw_lines(pen, chart, 0.0, 0.0, 1000.0, 300.0, dots=False)
    marks = [
        f'<span class="y" style="top:{100 - 100 * share(at, chart.y):.2f}%">{said}</span>'
        for at, said in chart.y_ticks
    ]
    marks += [
        f'<span class="x" style="left:{100 * share(at, chart.x):.2f}%">{said}</span>'
        for at, said in chart.x_ticks
    ]
    data = {
        "x": chart.x,
        "axis": asdict(chart.axis),
        "lines": [
            {
                "name": line.name,
                "points": [[float(f"{x:.7g}"), float(f"{y:.5g}")] for x, y in thin(line.points)],
            }
            for line in chart.lines
        ],
    }
    return (
        f'<figure class="chart">{_legend(chart.legend, "<output></output>")}'
        f'<div class="plot" data-chart="{escape(json.dumps(data, separators=(",", ":")))}">'
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio="none" role="img" aria-label="{escape(chart.title)}">'
        f"{''.join(pen.parts)}</svg>{''.join(marks)}<div class='cursor'></div></div>"
        f'<div class="axis">{escape(chart.axis.name)}</div></figure>'
    )


def _legend(keys: Mapping[str, str], more: str) -> str:
    drawn = "".join(
        f'<span class="key"><i style="background:{colour if colour.startswith("#") else f"var(--{colour})"}"></i>'
        f"{escape(word)}</span>"
        for colour, word in keys.items()
    )
    return f'<div class="legend">{drawn}{more}</div>' if drawn or more else ""


def details(summary: str, inside: str) -> str:
    """Something to open."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: int = 0) -> str:
    """A table whose last `numeric` columns are figures."""

    def line(tag: str, cells: Sequence[str]) -> str:
        first = len(cells) - numeric
        return "".join(
            f"<{tag}{' class=n' if i >= first else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    top = f"<thead><tr>{line('th', heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
