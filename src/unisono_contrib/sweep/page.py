"""A sweep as one page and as one sheet: the best value by steps trained, each trial's curve, each key's values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.report import html, sheet
from unisono.report.picture import ChartAxis, ChartLine, LineChart, line_chart
from unisono.spec.words import number
from unisono_contrib.sweep.progress import SweepProgress, Trial
from unisono_contrib.sweep.result import trained
from unisono_contrib.sweep.space import Interval

PAGE = "sweep.html"
_MOST = 64  # trials with a curve of their own


def write(
    progress: SweepProgress, lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], folder: Path,
    charts: Sequence[LineChart | None] = (),
) -> list[Path]:  # fmt: skip
    """Write sweep.html and sweep.png. charts: of the method. Raises OSError."""
    metric = facts["metric"]
    every = [
        *charts,
        best_so_far(progress, lines, metric),
        curves(progress, metric),
        *by_key(progress, metric),
    ]
    drawn = [chart for chart in every if chart is not None]
    headline, more = headlines(facts)
    heads = ("trial", "state", *progress.space, "failures", "step", metric)
    rows = [
        (str(row["trial"]), row["state"], *(str(row["params"].get(key, "")) for key in progress.space),
         str(row["failures"]), str(row["step"]), number(row["value"]))
        for row in facts["trials"]
    ]  # fmt: skip
    sections = [html.section("chart", chart.title, html.curves(chart)) for chart in drawn]
    body = [
        html.head(f"unisono sweep · {folder}", headline, more),
        *(html.pair(*sections[i : i + 2]) for i in range(0, len(sections), 2)),
        html.section("trials", "Trials", html.table(heads, rows, numeric=3)),
    ]
    page = write_whole(folder / PAGE, html.document(f"{folder.name}: unisono sweep", body))
    rows_of_charts = [drawn[i : i + 2] for i in range(0, len(drawn), 2)]
    return [page, sheet.write(page.with_suffix(".png"), headline, more, rows_of_charts)]


def headlines(facts: Mapping[str, Any]) -> tuple[str, str]:
    """(the best trial in a sentence, what the sweep took)."""
    best = facts["best"]
    values = ", ".join(f"{key} = {_said(value)}" for key, value in best["params"].items()) if best else ""
    if facts["conclusion"]:
        return facts["conclusion"][-1], _took(facts)
    headline = (
        f"best: {facts['metric']} {number(best['value'])} with {values}"
        if best
        else "no trial has ended with a value"
    )
    return headline, _took(facts)


def _took(facts: Mapping[str, Any]) -> str:
    states = [row["state"] for row in facts["trials"]]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"method {facts['method']} · {len(states)} trials: {counted} · {facts['steps']} steps trained"


def _said(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def best_so_far(progress: SweepProgress, lines: Sequence[Mapping[str, Any]], metric: str) -> LineChart | None:
    """The best value of all pieces until then, by the steps that all trials have trained."""
    points, best = list[tuple[float, float]](), None
    for steps, _, _, value in trained(lines):
        if value is not None and (best is None or progress.cost(value) < progress.cost(best)):
            best = value
        if best is not None:
            points.append((float(steps), best))
    return line_chart(f"Best {metric} so far, by steps of all trials", [ChartLine("best", points, dots=True)])


def curves(progress: SweepProgress, metric: str) -> LineChart | None:
    """The metric of each trial at the ends of its pieces."""
    best = progress.best
    lines = [
        ChartLine(
            "best" if trial is best else "",
            _points(trial),
            "accent_b" if trial is best else "pale",
            dots=True,
        )
        for trial in sorted(progress.trials, key=lambda trial: trial is best)[-_MOST:]
    ]
    return line_chart(f"{metric} of each trial, by step", lines)


def _points(trial: Trial) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in trial.values if value is not None]


def by_key(progress: SweepProgress, metric: str) -> list[LineChart]:
    """For each searched number, the metric that trials with its values came to."""
    charts, best = list[LineChart](), progress.best
    for key, dimension in progress.space.items():
        if not isinstance(dimension, Interval):
            continue
        lines = [
            ChartLine(
                "best" if trial is best else "", [(float(trial.params[key]), trial.value)],
                "accent_b" if trial is best else "accent", 4.0,
            )
            for trial in progress.trials
            if trial.value is not None
        ]  # fmt: skip
        chart = line_chart(f"{metric}, by {key}", lines, axis=ChartAxis(key, dimension.whole, dimension.log))
        charts += [chart] if chart is not None else []
    return charts
