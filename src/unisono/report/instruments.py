"""How far apart replicas were: what a policy says of each step beside its loss, as curves and as a histogram.

A policy says it through `Sync.metrics()`, under the keys of `spec.words.INSTRUMENTS`, a number each; and under
`staleness_counts`, a list: how many contributions of the step were 0, 1, 2 ... updates old.
"""

from collections.abc import Mapping, Sequence
from html import escape

from unisono.report import html, picture
from unisono.report.charts import points_of
from unisono.report.collect import RunRecord
from unisono.report.picture import BarChart, ChartLine, LineChart
from unisono.report.sheet import Chart
from unisono.spec import words
from unisono.spec.words import is_number, percent

TITLES: Mapping[str, str] = {
    "staleness": "Staleness: updates since the weights of a gradient were read",
    "consensus": "Consensus distance: of the replicas' weights from their mean",
    "effective_batch": "Effective batch: samples in an update",
    "idle_share": "Idle share: part of a step in which a replica waits",
    "cohort": "Cohort: peers whose deltas counted in a round",
    "epsilon": "Epsilon: what the run may have revealed so far of any one sample or client",
    "noise_scale": "Gradient noise scale, in samples: batches far above it gain little",
    "reward": "Reward: mean of the sequences of a step",
    "kl_sampler": "KL(sampler, trainer), in nats per token",
    "val_gap": "Generalisation gap: loss on held-out samples less that of training",
}
COUNTS = "staleness_counts"
ROWS = 16
"""Rows of a histogram: what is staler is counted in the last of them."""

Drawn = tuple[RunRecord, str, str]  # a run, its name in the legend ("" for none), its colour


def curves(runs: Sequence[Drawn], titles: Mapping[str, str] = TITLES) -> list[LineChart]:
    """A chart by step for each key of `titles` of which any of the runs says something."""
    drawn = []
    for key, title in titles.items():
        lines = [
            ChartLine(name, picture.smooth_if_many(points_of(run.steps, key)), colour)
            for run, name, colour in runs
        ]
        drawn.append(picture.line_chart(title, lines, zero=True))
    return [chart for chart in drawn if chart is not None]


def staleness(run: RunRecord) -> list[int]:
    """Contributions that were 0, 1, 2 ... updates old, of all steps together; empty where no policy counted them."""
    total: list[int] = []
    for record in run.steps:
        counts = record.get(COUNTS)
        if not isinstance(counts, list) or not all(is_number(count) and count >= 0 for count in counts):
            continue
        total += [0] * (len(counts) - len(total))
        for late, count in enumerate(counts):
            total[late] += count
    return total


def histogram(
    run: RunRecord, title: str = "Contributions by their staleness", colour: str = "accent"
) -> BarChart | None:
    """A bar for each staleness that occurred, and those below it."""
    counts = staleness(run)
    while counts and not counts[-1]:
        counts.pop()
    if not counts:
        return None
    if len(counts) > ROWS:
        counts = [*counts[: ROWS - 1], sum(counts[ROWS - 1 :])]
        last = f"{ROWS - 1} or more"
    else:
        last = str(len(counts) - 1)
    names = [*map(str, range(len(counts) - 1)), last]
    total = sum(counts)
    sizes = [
        (name, count, f"{words.count(count)}, {percent(count / total)}")
        for name, count in zip(names, counts, strict=True)
    ]
    return picture.sized(title, sizes, colour)


def section(run: RunRecord) -> str:
    """All that the run's policy says of its replicas; nothing of one that says nothing."""
    charts, bars = curves([(run, "", "accent")]), histogram(run)
    parts = [f"<h3>{escape(chart.title)}</h3>{html.curves(chart)}" for chart in charts]
    parts += [f"<h3>{escape(bars.title)}</h3>{html.bars(bars)}"] if bars else []
    return html.section("replicas", "How far apart the replicas were", *parts) if parts else ""


def sheet_rows(run: RunRecord) -> list[list[Chart]]:
    """The same for a sheet, two beside each other."""
    charts: list[Chart] = [*curves([(run, "", "accent")])]
    charts += [bars] if (bars := histogram(run)) else []
    return [charts[i : i + 2] for i in range(0, len(charts), 2)]
