"""A priced plan as a page: the way from the ideal to the expected step, and one step as it would be seen.

Like the report of a run it is one file that needs nobody, and it knows nothing but plain values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.programs import draw
from unisono.programs.pipeline import Placed
from unisono.report import chart, html, words
from unisono.report.analyse import percent

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


def page(forecast: Forecast) -> str:
    """The whole page as text."""
    facts = forecast.facts
    body = [
        f'<header><p class="run">unisono simulate · {escape(str(facts["plan"]))} · {escape(str(facts["cluster"]))}</p>'
        f'<h1 data-testid="verdict">{escape(sentence(forecast))}</h1>{_trust(facts)}</header>',
        _tiles(facts),
        _waterfall(forecast),
        _timeline(forecast),
        '<div class="pair">',
        _memory(facts),
        _traffic(facts),
        "</div>",
        _blocks(facts),
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


def _trust(facts: Mapping[str, Any]) -> str:
    said = f"Nothing was run. Prices with the stack {facts['stack']}: {trust(facts)}."
    return f'<p class="advice">{escape(said)}</p>'


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
    drawn = (f"<div><dt>{a}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in tiles)
    return f'<dl class="tiles" data-testid="tiles">{"".join(drawn)}</dl>'


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


def _waterfall(forecast: Forecast) -> str:
    parts, step = forecast.waterfall, forecast.facts["step_s"]
    rows = [[what, words.seconds(seconds), percent(seconds / step)] for what, seconds in parts]
    rows.append(["expected step", words.seconds(step), percent(1.0)])
    bars = chart.waterfall([(what, s, part_of(what)) for what, s in forecast.visible], "expected step")
    table = chart.table(("what", "seconds", "part"), rows, numeric=2)
    return (
        '<section data-testid="waterfall"><h2>From the ideal to the expected step</h2>'
        f"{bars}{chart.details('As a table', table)}"
        '<p class="note">Each bar begins where the one above it ends; the last is their sum.</p></section>'
    )


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


def _timeline(forecast: Forecast) -> str:
    cut = windows(forecast)
    kinds = {p.action.kind for p in forecast.placed}
    parts = [part for kind, part in (("F", "forward"), ("B", "backward"), ("W", "weight")) if kind in kinds]
    parts += [AFTER_PARTS[part.split()[0]] for part, _ in forecast.after]
    pictures = []
    for window in cut:
        title = window.title if len(cut) > 1 else ""
        blocks = draw.blocks(window.placed, 1000, " ms")
        blocks = [_clipped(block, window) for block in blocks] + _after(window)
        drawn = draw.blocks_svg(
            blocks, window.names, title="Timeline of the simulated step", begin=window.begin, until=window.end, gutter=0
        )  # fmt: skip
        names = "".join(f'<span style="height:26px">{escape(name)}</span>' for name in window.names)
        said = f"<h3>{escape(title)}</h3>" if title else ""
        pictures.append(
            f'{said}<div class="rows"><div class="names">{names}</div>{drawn}</div>'
            f"{chart.time_axis(window.end - window.begin, window.begin)}"
        )
    return (
        f'<section data-testid="timeline"><h2>One step, simulated: {words.seconds(forecast.length)}</h2>'
        f'{chart.legend(list(dict.fromkeys(parts)))}{"".join(pictures)}<p class="note">{escape(notes(forecast))}</p>'
        "</section>"
    )


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


def _clipped(block: draw.Bar, window: Window) -> draw.Bar:
    start, stop = max(block.start, window.begin), min(block.stop, window.end)
    return draw.Bar(block.row, start, stop, block.fill, block.label, block.hover)


def _after(window: Window) -> list[draw.Bar]:
    """What every row does when the last computation is over."""
    made = []
    for part, start, stop in window.after:
        kind, _, axis = part.partition(" ")
        name = words.PART_NAMES[AFTER_PARTS[kind]] + (f" on {axis}" if axis else "")
        for row in range(len(window.names)):
            hover = f"{name}: at {words.seconds(start)} for {words.seconds(stop - start)}"
            made.append(draw.Bar(row, start, stop, f"var(--{AFTER_PARTS[kind]})", "", hover))
    return made


def _memory(facts: Mapping[str, Any]) -> str:
    parts = facts["mem_gib"]
    sizes = [(_MEMORY.get(name, name), size) for name, size in parts.items() if size > 0 and name != "total"]
    bars = [*sizes, ("total", facts["mem_gib"]["total"]), ("device has", facts["capacity_gib"])]
    drawn = chart.plain_bars(bars, {name: gibibytes(size) for name, size in bars})
    return f'<section data-testid="memory"><h2>Memory of the fullest rank</h2>{drawn}</section>'


def _blocks(facts: Mapping[str, Any]) -> str:
    """The model, part by part, as `simulate --blocks` has it."""
    every = facts.get("blocks") or []
    if not every:
        return ""
    axes = list(dict.fromkeys(axis for one in every for axis, moved in one["sent_bytes"].items() if moved))
    heads = ("part", "how many", "parameters", "FLOPs", "kept", *(f"sent on {axis}" for axis in axes))
    rows = [
        [
            f"{'of it ' if one['inside'] else ''}{one['part']}",
            str(one["count"]),
            words.count(one["parameters"]) if one["parameters"] else "",
            words.count(one["flops_per_sample"]) if one["flops_per_sample"] else "",
            words.nbytes(one["kept_bytes"]) if one["kept_bytes"] else "",
            *(words.nbytes(moved) if (moved := one["sent_bytes"].get(axis)) else "" for axis in axes),
        ]
        for one in every
    ]
    size = facts["batch"]["micro_batch"]
    note = (
        "Of one of each, in the mean: parameters, and FLOPs of a sample's forward pass; on a rank that has it, what a"
        f" micro-batch of {size} keeps until its backward pass, and what is sent in a step."
    )
    return (
        '<section data-testid="blocks"><h2>The model, part by part</h2>'
        f'{chart.table(heads, rows, numeric=len(heads) - 1)}<p class="note">{escape(note)}</p></section>'
    )


def _traffic(facts: Mapping[str, Any]) -> str:
    if not facts["comm"]:
        return '<section data-testid="comm"><h2>Communication</h2><p class="note">None.</p></section>'
    rows = [
        [axis, words.nbytes(t["bytes"]), words.seconds(t["seconds"]), words.seconds(t["exposed_s"])]
        for axis, t in facts["comm"].items()
    ]
    table = chart.table(("axis", "sent by a rank", "takes", "exposed"), rows, numeric=3)
    return (
        f'<section data-testid="comm"><h2>Communication of a step</h2>{table}<p class="note">Exposed is what no '
        "computation hides.</p></section>"
    )
