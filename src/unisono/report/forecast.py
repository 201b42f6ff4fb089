"""A priced plan as a page: the way from the ideal to the expected step, and one step as it would be seen.

Like the report of a run it is one file that needs nobody, and it knows nothing but plain values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.programs.pipeline import Placed
from unisono.report import html, picture, sheet
from unisono.report.picture import Bar, BarChart, BarRow
from unisono.report.placed import bars
from unisono.spec import words
from unisono.spec.words import percent

ROWS = 16  # of the pipeline that are drawn, evenly chosen where there are more
ACTIONS = 1200  # in one picture: what does not fit is shown as its beginning and its end
AFTER_PARTS: Mapping[str, str] = {
    "comm": "comm_exposed", "optim": "optim", "other": "other", "wait": "wait", "data": "data",
}  # fmt: skip
_GIB = 1024.0  # MiB
_MEMORY = {"params": "weights", "grads": "gradients", "optim": "optimiser", "communication": "buffers"}


@dataclass(frozen=True)
class Forecast:
    """What is drawn. facts: the object of `simulate --json`. placed, after: a simulated step, see `planner.timeline`;
    names: of its rows; idle: share of the rows' time without computing."""

    facts: Mapping[str, Any]
    placed: Sequence[Placed]
    after: Sequence[tuple[str, float]]
    names: Sequence[str]
    idle: float

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
    """Write the page, whole or not at all. Raises OSError."""
    return write_whole(path, page(forecast))


def write_picture(forecast: Forecast, path: str | Path) -> Path:
    """Draw the way to the expected step, and the step itself, on a sheet, whole or not at all. Raises OSError."""
    facts = forecast.facts
    said = (
        f"unisono simulate · {facts['plan']} · {facts['cluster']} · {words.count(facts['tokens_per_s'])} tokens/s · "
        f"MFU {percent(facts['mfu'])} · {trust(facts)}"
    )
    rows = [[waterfall(forecast)], *([chart] for chart in timeline(forecast))]
    return sheet.write(path, sentence(forecast), said, rows)


def page(forecast: Forecast) -> str:
    """The whole page as text."""
    facts = forecast.facts
    about = f"Nothing was run. Prices with the stack {facts['stack']}: {trust(facts)}."
    body = [
        html.head(f"unisono simulate · {facts['plan']} · {facts['cluster']}", sentence(forecast), about),
        _tiles(facts),
        _waterfall(forecast),
        _timeline(forecast),
        html.pair(_memory(facts), _traffic(facts)),
    ]
    return html.document(f"{facts['plan']}: unisono simulate", body)


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


def _tiles(facts: Mapping[str, Any]) -> str:
    batch = facts["batch"]
    tiles = [
        ("time per step", words.seconds(facts["step_s"]), f"batch of {batch['global_batch']}"),
        ("tokens/s", words.count(facts["tokens_per_s"]), ""),
        ("of peak (MFU)", percent(facts["mfu"]), f"{facts['tflops_per_device']:.3g} TFLOP/s a device"),
        ("bubble", percent(facts["bubble"]), f"{batch['micros']} micro-batches"),
        ("memory", gibibytes(facts["mem_gib"]["total"]), f"of {gibibytes(facts['capacity_gib'])}"),
    ]
    if facts.get("data"):
        data = facts["data"]
        late = (
            f"{words.seconds(data['exposed_s'])} of a step are waited for" if data["exposed_s"] else "hidden"
        )
        tiles.append(("samples/s a host loads", words.count(data["needs_samples_s"]), late))
    if facts.get("days_to_train"):
        days = facts["days_to_train"]
        tiles.append(("all steps", words.seconds(days * 86400) if days < 2 else f"{days:.3g} days", ""))
    if facts.get("cost"):
        tiles.append(("cost", words.count(facts["cost"]), "of all steps"))
    return html.tiles(tiles)


def gibibytes(size: float) -> str:
    """A size in GiB, in MiB where it is small."""
    return words.mebibytes(size * _GIB)


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


def _waterfall(forecast: Forecast) -> str:
    parts, step, chart = forecast.waterfall, forecast.facts["step_s"], waterfall(forecast)
    rows = [[what, words.seconds(seconds), percent(seconds / step)] for what, seconds in parts]
    rows.append(["expected step", words.seconds(step), percent(1.0)])
    table = html.details("As a table", html.table(("what", "seconds", "part"), rows, numeric=2))
    said = html.note("Each bar begins where the one above it ends; the last is their sum.")
    return html.section("waterfall", chart.title, html.bars(chart), table, said)


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


def _timeline(forecast: Forecast) -> str:
    charts = timeline(forecast)
    titled = [f"<h3>{escape(window.title)}</h3>" if len(charts) > 1 else "" for window in windows(forecast)]
    drawn = (title + html.bars(chart) for title, chart in zip(titled, charts, strict=True))
    title = f"One step, simulated: {words.seconds(forecast.length)}"
    return html.section("timeline", title, *drawn, html.note(notes(forecast)))


def notes(forecast: Forecast) -> str:
    """What the picture of the timeline leaves out."""
    facts = forecast.facts
    more = (
        f" {min(ROWS, len(forecast.names))} of {len(forecast.names)} rows are drawn."
        if len(forecast.names) > ROWS
        else ""
    )
    gap = facts["step_s"] - forecast.length
    idle = percent(forecast.idle)
    told = f"Numbers are micro-batches; grey is idle, {idle} of the rows' time until the last backward.{more}"
    if abs(gap) > 0.005 * facts["step_s"]:
        side = "shorter" if gap > 0 else "longer"
        told += (
            f" The picture is {words.seconds(abs(gap))} {side} than the expected step: the price counts all messages,"
            " and a mean row in the bubble; here each row waits for what it needs."
        )
    return told


def _after(window: Window) -> list[Bar]:
    """What every row does when the last computation is over."""
    bars = []
    for part, start, stop in window.after:
        kind, _, axis = part.partition(" ")
        name = words.PART_NAMES[AFTER_PARTS[kind]] + (f" on {axis}" if axis else "")
        hover = f"{name}: at {words.seconds(start)} for {words.seconds(stop - start)}"
        bars += [Bar(row, start, stop, AFTER_PARTS[kind], "", hover) for row in range(len(window.names))]
    return bars


def _memory(facts: Mapping[str, Any]) -> str:
    parts = facts["mem_gib"]
    sizes = [
        (str(_MEMORY.get(name, name)), size) for name, size in parts.items() if size > 0 and name != "total"
    ]
    sizes += [("total", parts["total"]), ("device has", facts["capacity_gib"])]
    chart = picture.sized("Memory of the fullest rank", [(n, size, gibibytes(size)) for n, size in sizes])
    return html.section("memory", chart.title, html.bars(chart))


def _traffic(facts: Mapping[str, Any]) -> str:
    if not facts["comm"]:
        return html.section("comm", "Communication", html.note("None."))
    rows = [
        [axis, words.nbytes(t["bytes"]), words.seconds(t["seconds"]), words.seconds(t["exposed_s"])]
        for axis, t in facts["comm"].items()
    ]
    table = html.table(("axis", "sent by a rank", "takes", "exposed"), rows, numeric=3)
    said = html.note("Exposed is what no computation hides.")
    return html.section("comm", "Communication of a step", table, said)
