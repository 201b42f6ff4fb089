"""A priced plan as a picture: the way from the ideal to the expected step, and one step as it would be seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.programs.pipeline import Placed
from unisono.report import picture, sheet
from unisono.report.picture import Bar, BarChart, BarRow
from unisono.report.placed import bars
from unisono.spec import words
from unisono.spec.words import percent

ROWS = 16  # of the pipeline that are drawn, evenly chosen where there are more
ACTIONS = 1200  # in one picture: what does not fit is shown as its beginning and its end
AFTER_PARTS: Mapping[str, str] = {
    "comm": "comm_exposed", "optim": "optim", "other": "other", "wait": "wait", "data": "data",
}  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """What is drawn. facts: the object of `simulate --json`. placed, after: a simulated step, see `planner.timeline`;
    names: of its rows."""

    facts: Mapping[str, Any]
    placed: Sequence[Placed]
    after: Sequence[tuple[str, float]]
    names: Sequence[str]

    @property
    def waterfall(self) -> list[tuple[str, float]]:
        """(what, seconds) from the ideal on; the sum is the step."""
        return [(str(part["what"]), float(part["seconds"])) for part in self.facts["waterfall"]]

    @property
    def visible(self) -> list[tuple[str, float]]:
        """The waterfall without what is too small to be seen."""
        return [part for part in self.waterfall if abs(part[1]) > 5e-4 * self.facts["step_s"]]

    @property
    def computed(self) -> float:
        """Seconds until the last row has ended its last computation."""
        return max(p.stop for p in self.placed)

    @property
    def length(self) -> float:
        return self.computed + sum(seconds for _, seconds in self.after)


@dataclass(frozen=True)
class Window:
    """A stretch of the simulated step, in seconds, and what is computed in it; rows are numbered as they are drawn."""

    begin: float
    end: float
    placed: tuple[Placed, ...]
    names: tuple[str, ...]
    after: tuple[tuple[str, float, float], ...] = ()  # (part, start, stop) on every row

    @property
    def title(self) -> str:
        return f"The {'last' if self.begin else 'first'} {words.seconds(self.end - self.begin)}"


def write(forecast: Forecast, path: str | Path) -> Path:
    """Draw the way to the expected step, and the step itself, whole or not at all. The suffix, .png or .svg, is the
    format. Raises OSError."""
    facts = forecast.facts
    said = (
        f"unisono simulate · {facts['plan']} · {facts['cluster']} · {words.count(facts['tokens_per_s'])} tokens/s · "
        f"MFU {percent(facts['mfu'])} · {trust(facts)}"
    )
    rows = [[waterfall(forecast)], *([chart] for chart in timeline(forecast))]
    return sheet.write(path, sentence(forecast), said, rows)


def sentence(forecast: Forecast) -> str:
    """How long a step is expected to take, and the two greatest losses."""
    facts, parts = forecast.facts, forecast.waterfall
    step = facts["step_s"]
    lost = sorted(parts[1:], key=lambda part: -part[1])[:2]
    most = " and ".join(
        f"{_spoken(what)} ({percent(seconds / step)})" for what, seconds in lost if seconds > 0
    )
    return (
        f"A step is expected to take {words.seconds(step)}: {percent(parts[0][1] / step)} of it is the model's "
        f"arithmetic at peak" + (f"; the most is lost to {most}." if most else ".")
    )


def _spoken(what: str) -> str:
    """A step of the waterfall inside a sentence."""
    named = {
        "bubble": "the pipeline's bubble",
        "optimiser": "the optimiser",
        "fixed per step": "what each step costs",
        "stragglers": "waiting for stragglers",
        "data loading": "waiting for data",
    }
    return what.replace("exposed on ", "unhidden communication on ") if what not in named else named[what]


def trust(facts: Mapping[str, Any]) -> str:
    """How right the price is, where anyone knows."""
    if facts["error_pct"] is None:
        return "how right is not known: no such model was held beside measurements"
    return f"right within about {facts['error_pct']:.0f} %"


def part_of(what: str) -> str:
    """The colour of a step of the waterfall."""
    for start, part in (
        ("ideal", "forward"),
        ("exposed", "comm_exposed"),
        ("bubble", "wait"),
        ("uneven", "wait"),
        ("straggler", "wait"),
        ("optimiser", "optim"),
        ("fixed", "other"),
        ("data", "data"),
    ):
        if what.startswith(start):
            return part
    return "backward"


def waterfall(forecast: Forecast) -> BarChart:
    """Each bar begins where the one above it ends; the last is their sum."""
    step, at = forecast.facts["step_s"], 0.0
    rows, bars = [], []
    for row, (what, seconds) in enumerate(forecast.visible):
        share = percent(seconds / step)
        rows.append(BarRow(what, value=f"{'-' if seconds < 0 else ''}{words.seconds(abs(seconds))}"))
        hover = f"{what}: {share} of the step"
        bars.append(Bar(row, min(at, at + seconds), max(at, at + seconds), part_of(what), share, hover))
        at += seconds
    rows.append(BarRow("expected step", value=words.seconds(step)))
    bars.append(Bar(len(bars), 0.0, step, "accent"))
    end = max(bar.stop for bar in bars)
    return BarChart("From the ideal to the expected step", rows, bars, end, keys={})


def windows(forecast: Forecast) -> list[Window]:
    """The whole step, or, where that would be too many actions to see one, its beginning and its end."""
    count = len(forecast.names)
    kept = range(count) if count <= ROWS else sorted({i * (count - 1) // (ROWS - 1) for i in range(ROWS)})
    drawn = {row: at for at, row in enumerate(kept)}
    names = tuple(forecast.names[row] for row in kept)
    placed = [p._replace(row=drawn[p.row]) for p in forecast.placed if p.row in drawn]
    after, at = [], forecast.computed
    for part, seconds in forecast.after:
        after.append((part, at, at + seconds))
        at += seconds
    if len(placed) <= ACTIONS:
        return [Window(0.0, at, tuple(placed), names, tuple(after))]
    half = ACTIONS // 2
    cut = sorted(p.start for p in placed)[half]
    begun = Window(0.0, cut, tuple(p for p in placed if p.start < cut), names)
    rest = sorted(p.stop for p in placed)[-half]
    ended = Window(rest, at, tuple(p for p in placed if p.stop > rest), names, tuple(after))
    return [begun, ended]


def timeline(forecast: Forecast) -> list[BarChart]:
    """The simulated step, whole or as its beginning and its end."""
    cut, step = windows(forecast), f"One step, simulated: {words.seconds(forecast.length)}"
    return [
        BarChart(
            f"{step}. {window.title}" if len(cut) > 1 else step,
            [BarRow(name) for name in window.names],
            [*bars(window.placed), *_after(window)],
            window.end,
            window.begin,
            picture.time_ticks(window.begin, window.end),
        )
        for window in cut
    ]


def _after(window: Window) -> list[Bar]:
    """What every row does when the last computation is over."""
    bars = []
    for part, start, stop in window.after:
        kind, _, axis = part.partition(" ")
        name = words.PART_NAMES[AFTER_PARTS[kind]] + (f" on {axis}" if axis else "")
        hover = f"{name}: at {words.seconds(start)} for {words.seconds(stop - start)}"
        bars += [Bar(row, start, stop, AFTER_PARTS[kind], "", hover) for row in range(len(window.names))]
    return bars
