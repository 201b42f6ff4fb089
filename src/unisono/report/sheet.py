"""What the PNG pictures share: colours, axes, a timetable's rows; drawn with matplotlib, light, 1600 pixels wide."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.programs.pipeline import Placed
from unisono.report import words

COLOURS = {
    "data": "#56b4e9",
    "forward": "#0072b2",
    "backward": "#00785a",
    "weight": "#8a5a00",
    "comm_exposed": "#c04f00",
    "comm_hidden": "#e2a12f",
    "wait": "#b9bfc9",
    "optim": "#9a4f88",
    "other": "#8a8371",
}
INK, SOFT, RULE, IDLE = "#1a1d23", "#565d69", "#d9dce1", "#eef0f3"
_PARTS: Mapping[str, str] = {"F": "forward", "B": "backward", "W": "weight"}


def blank(height: float) -> Any:
    """A white sheet, 16 inches of 100 pixels wide and `height` high."""
    # Imported here because it costs a second, which `unisono --help` and the page must not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, height), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | Path) -> Path:
    """Write the sheet, whole or not at all. Raises OSError."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return write_whole(path, buffer.getvalue())


def timetables(
    cases: Sequence[tuple[str, Sequence[Placed]]], names: Sequence[str], path: str | Path, headline: str
) -> Path:
    """Timetables of the same rows under one another on one time axis: (title, placed) each. Raises OSError."""
    tall = 0.85 + 0.34 * len(names)
    figure = blank(0.9 + len(cases) * (tall + 0.55))
    total = figure.get_figheight()
    figure.text(0.025, 1 - 0.3 / total, headline, fontsize=17, weight="bold", color=INK, va="top")
    grid = figure.add_gridspec(
        len(cases), 1, left=0.075, right=0.975, top=1 - 1.05 / total, bottom=0.45 / total, hspace=0.75 / tall
    )
    until = max(p.stop for _, placed in cases for p in placed)
    for at, (title, placed) in enumerate(cases):
        axes = figure.add_subplot(grid[at, 0])
        frame(axes, title, grid=False)
        timetable(axes, placed, until)
        rows(axes, names)
        axes.set_xlim(0, until)
        time_axis(axes)
        if not at:
            legend(axes)
    return save(figure, path)


def timetable(axes: Any, placed: Sequence[Placed], until: float, begin: float = 0.0) -> None:
    """Each row's actions from `begin` to `until` seconds, with the micro-batch on them where there is room."""
    length = until - begin
    for row in {p.row for p in placed}:
        axes.barh(row, length, left=begin, height=0.78, color=IDLE)
    for p in placed:
        wide, part = p.stop - p.start, _PARTS[p.action.kind]
        edge = {"edgecolor": "white", "linewidth": 0.6} if wide > 0.002 * length else {}
        axes.barh(
            p.row, wide, left=p.start, height=0.78, color=COLOURS[part], label=words.PART_NAMES[part], **edge
        )  # fmt: skip
        middle = p.start + wide / 2
        if wide > 0.012 * length and begin < middle < until:
            axes.text(middle, p.row, p.action.micro, ha="center", va="center", fontsize=9, color="white")


def frame(axes: Any, title: str, grid: bool = True) -> None:
    """A title on the left, and no more lines than are needed."""
    axes.set_title(title, loc="left", fontsize=13, weight="bold", color=INK, pad=8)
    for side in ("top", "right", *(() if grid else ("left", "bottom"))):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
    axes.tick_params(colors=SOFT, labelsize=11, length=0)
    if grid:
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)


def rows(axes: Any, names: Sequence[str]) -> None:
    """Names of the rows, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)


def time_axis(axes: Any) -> None:
    """Seconds in words along x."""
    axes.xaxis.set_major_formatter(lambda value, _: words.seconds(value) if value > 0 else "0")


def legend(axes: Any) -> None:
    """One entry per part, in the parts' own order, on the title's line."""
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(reversed(labels), reversed(handles), strict=True))
    names = [name for name in words.PART_NAMES.values() if name in first]
    axes.legend(
        [first[name] for name in names], names, ncols=len(names), frameon=False, fontsize=10.5, loc="lower right",
        bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, handlelength=1.0, handleheight=1.0, columnspacing=1.2,
    )  # fmt: skip
