"""The page of a priced plan as one picture: the waterfall, and the simulated step under it."""

import textwrap
from pathlib import Path
from typing import Any

from unisono.report import sheet, words
from unisono.report.analyse import percent
from unisono.report.forecast import AFTER_PARTS, Forecast, Window, part_of, sentence, trust, windows


def write(forecast: Forecast, path: str | Path) -> Path:
    """Draw the sheet (1600 pixels wide), whole or not at all. Raises OSError."""
    cut = windows(forecast)
    heights = [0.7 + 0.36 * (1 + len(forecast.visible)), *(0.8 + 0.34 * len(w.names) for w in cut)]
    figure = sheet.blank(1.5 + sum(heights) + 0.55 * len(heights))
    total = figure.get_figheight()
    headline = textwrap.fill(sentence(forecast), 104)
    figure.text(0.025, 1 - 0.3 / total, headline, fontsize=17, weight="bold", color=sheet.INK, va="top")
    facts = forecast.facts
    said = (
        f"unisono simulate · {facts['plan']} · {facts['cluster']} · {words.count(facts['tokens_per_s'])} tokens/s · "
        f"MFU {percent(facts['mfu'])} · {trust(facts)}"
    )
    below = 0.3 + 0.29 * (1 + headline.count("\n")) + 0.1
    figure.text(
        0.025, 1 - below / total, textwrap.shorten(said, 180), fontsize=11, color=sheet.SOFT, va="top"
    )
    edges = {"right": 0.975, "top": 1 - (below + 0.75) / total, "bottom": 0.45 / total}
    gap = 0.78 * len(heights) / sum(heights)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights, hspace=gap, left=0.075, **edges)
    wide = figure.add_gridspec(len(heights), 1, height_ratios=heights, hspace=gap, left=0.24, **edges)
    _waterfall(figure.add_subplot(wide[0, 0]), forecast)
    for at, window in enumerate(cut):
        title = f"One step, simulated: {words.seconds(forecast.length)}"
        part = f". {window.title}" if len(cut) > 1 else ""
        _timeline(figure.add_subplot(grid[at + 1, 0]), window, title + part)
    return sheet.save(figure, path)


def _waterfall(axes: Any, forecast: Forecast) -> None:
    sheet.frame(axes, "From the ideal to the expected step", grid=False)
    step, at, names = forecast.facts["step_s"], 0.0, []
    for row, (what, seconds) in enumerate(forecast.visible):
        left = min(at, at + seconds)
        axes.barh(row, abs(seconds), left=left, height=0.74, color=sheet.COLOURS[part_of(what)])
        _said(
            axes, row, left, abs(seconds), step, f"{words.seconds(abs(seconds))}, {percent(seconds / step)}"
        )
        at += seconds
        names.append(what)
    axes.barh(len(names), step, height=0.74, color=sheet.INK)
    _said(axes, len(names), 0.0, step, step, words.seconds(step))
    sheet.rows(axes, [*names, "expected step"])
    axes.set_xlim(0, step * 1.02)
    sheet.time_axis(axes)


def _said(axes: Any, row: int, left: float, wide: float, step: float, text: str) -> None:
    """A bar's figure: in it if it is wide, beside it on the side where there is room."""
    if wide > 0.15 * step:
        axes.text(left + wide / 2, row, text, ha="center", va="center", fontsize=10, color="white")
    elif left + wide < 0.85 * step:
        axes.text(left + wide + 0.006 * step, row, text, ha="left", va="center", fontsize=10, color=sheet.INK)
    else:
        axes.text(left - 0.006 * step, row, text, ha="right", va="center", fontsize=10, color=sheet.INK)


def _timeline(axes: Any, window: Window, title: str) -> None:
    sheet.frame(axes, title, grid=False)
    sheet.timetable(axes, window.placed, window.end, window.begin)
    for part, start, stop in window.after:
        kind = AFTER_PARTS[part.split()[0]]
        for row in range(len(window.names)):
            axes.barh(
                row,
                stop - start,
                left=start,
                height=0.78,
                color=sheet.COLOURS[kind],
                label=words.PART_NAMES[kind],
            )
    sheet.rows(axes, list(window.names))
    axes.set_xlim(window.begin, window.end)
    sheet.time_axis(axes)
    sheet.legend(axes)
