"""Timetables as pictures: text for terminals and documents, SVG for pages; planned and measured alike.

Both take placed actions, whether `play_costs` placed them or a clock did, so a plan and what became of it are drawn
by the same hand and can be laid side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from unisono.programs.pipeline import Placed

# Safe for colour-blind readers (after Okabe and Ito, 2008); pages may set the variables, alone the fallbacks hold.
FILLS = {
    "F": "var(--forward, #0072b2)",
    "B": "var(--backward, #00785a)",
    "W": "var(--weight, #8a5a00)",
}
_WORDS = {"F": "forward", "B": "backward", "W": "weight gradient"}
_LABEL_PERCENT = 1.7  # narrower blocks carry no number: two digits would not fit on a wide page
_PHONE_PERCENT = 7.0  # and these would not on a phone; the page hides their class there


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle on a row's time axis; `hover` is shown when pointed at, `thin` ones run along the row's foot."""

    row: int
    start: float
    stop: float
    fill: str
    label: str = ""
    hover: str = ""
    thin: bool = False


def text(placed: Sequence[Placed], names: Sequence[str] | None = None, unit: float | None = None) -> str:
    """One line per row; a column is `unit` of time (the shortest action's if not given), dots are idle time.

    Blocks are named by kind and micro-batch (`F0`), and by stage too where a row owns several (`F0/2`).
    """
    if not placed:
        return ""
    several = _several_stages(placed)
    rows = 1 + max(p.row for p in placed)
    column = unit or min(p.stop - p.start for p in placed if p.stop > p.start)
    begin = min(p.start for p in placed)
    cells = 1 + max(len(_name(p, several)) for p in placed)
    columns = round((max(p.stop for p in placed) - begin) / column)
    lines = [["." + " " * (cells - 1)] * columns for _ in range(rows)]
    for p in placed:
        first, last = round((p.start - begin) / column), round((p.stop - begin) / column)
        for at in range(first, last):
            lines[p.row][at] = (_name(p, several) if at == first else "-" * (cells - 1)).ljust(cells)
    titles = list(names) if names is not None else [f"rank {row}" for row in range(rows)]
    wide = max(len(title) for title in titles)
    return "\n".join(
        f"{title.ljust(wide)}  {''.join(line)}".rstrip() for title, line in zip(titles, lines, strict=True)
    )


def svg(
    placed: Sequence[Placed],
    names: Sequence[str] | None = None,
    *,
    title: str = "pipeline timetable",
    until: float | None = None,
    gutter: float = 8.0,
    scale: float = 1.0,
    unit: str = "",
) -> str:
    """A timetable as an SVG element; see `blocks_svg`. `scale` and `unit` turn its times into words for `hover`."""
    rows = (
        list(names)
        if names is not None
        else [f"rank {r}" for r in range(1 + max((p.row for p in placed), default=0))]
    )
    begin = min((p.start for p in placed), default=0.0)
    drawn = blocks(placed, scale, unit)
    return blocks_svg(drawn, rows, title=title, begin=begin, until=until, gutter=gutter)


def blocks(placed: Sequence[Placed], scale: float = 1.0, unit: str = "") -> list[Bar]:
    """A rectangle per action, with its micro-batch on it, and its stage too where rows own several."""
    several = _several_stages(placed)
    return [
        Bar(
            row=p.row,
            start=p.start,
            stop=p.stop,
            fill=FILLS.get(p.action.kind, "#777"),
            label=f"{p.action.micro}/{p.action.stage}" if several else str(p.action.micro),
            hover=f"{_WORDS.get(p.action.kind, p.action.kind)}, micro-batch {p.action.micro}, stage {p.action.stage}: "
            f"at {p.start * scale:.4g}{unit} for {(p.stop - p.start) * scale:.4g}{unit}",
        )
        for p in placed
    ]


def blocks_svg(
    blocks: Sequence[Bar],
    names: Sequence[str],
    *,
    title: str,
    begin: float | None = None,
    until: float | None = None,
    gutter: float = 8.0,
    row_height: int = 26,
) -> str:
    """An SVG element as wide as its place: times become percent of it, so letters keep their size on any screen.

    `begin` and `until` are the times at the left and right edge (first start, last stop if not given): give two
    pictures the same ones to compare them. `gutter` is the percentage left for the rows' names; 0 leaves them out.
    """
    left = begin if begin is not None else min((b.start for b in blocks), default=0.0)
    right = until if until is not None else max((b.stop for b in blocks), default=left + 1.0)
    foot = 8 if any(b.thin for b in blocks) else 0
    height = row_height + foot
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="timetable" role="img" width="100%"'
        + f' height="{len(names) * height}" font-family="system-ui, sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
    ]
    for row, name in enumerate(names):
        top = row * height
        if gutter:
            parts.append(
                f'<text x="0" y="{top + row_height / 2:g}" dominant-baseline="central"'
                f' style="fill:var(--ink, #222)">{escape(name)}</text>'
            )
        parts.append(
            f'<rect x="{gutter:g}%" y="{top + 2}" width="{100 - gutter:g}%" height="{row_height - 4}"'
            ' style="fill:var(--idle, #ececec)"/>'
        )
    percent = (100 - gutter) / ((right - left) or 1.0)
    for block in blocks:
        parts.append(_drawn(block, gutter, left, percent, height, row_height))
    return "".join([*parts, "</svg>"])


def _drawn(block: Bar, gutter: float, begin: float, percent: float, height: int, row_height: int) -> str:
    x, wide = gutter + (block.start - begin) * percent, (block.stop - block.start) * percent
    top = block.row * height + (row_height - 1 if block.thin else 2)
    tall = 6 if block.thin else row_height - 4
    edge = ";stroke:var(--paper, #fff);stroke-width:.6" if wide > 0.4 else ""
    drawn = (
        f'<rect x="{x:.3f}%" y="{top}" width="{wide:.3f}%" height="{tall}" style="fill:{block.fill}{edge}"/>'
    )
    letters = max(1.0, len(block.label) / 2)
    if block.label and not block.thin and wide >= _LABEL_PERCENT * letters:
        hidden = ' class="wide-only"' if wide < _PHONE_PERCENT * letters else ""
        drawn += (
            f'<text{hidden} x="{x + wide / 2:.3f}%" y="{top + tall / 2:g}" text-anchor="middle"'
            ' dominant-baseline="central" pointer-events="none"'
            f' style="fill:var(--on-block, #fff)">{escape(block.label)}</text>'
        )
    return f"<g><title>{escape(block.hover)}</title>{drawn}</g>" if block.hover else drawn


def _name(p: Placed, several: bool) -> str:
    return f"{p.action.kind}{p.action.micro}" + (f"/{p.action.stage}" if several else "")


def _several_stages(placed: Sequence[Placed]) -> bool:
    return len({(p.row, p.action.stage) for p in placed}) > len({p.row for p in placed})
