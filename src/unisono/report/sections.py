"""Sections that few runs have: the load of a model's experts as its routers told it, and how far a codec's sums were
off the plain ones where a run sampled them."""

from collections.abc import Sequence
from statistics import fmean

from unisono.report import html, picture
from unisono.report.collect import Record, RunRecord
from unisono.report.picture import ChartLine, LineChart
from unisono.spec.words import is_number, percent

LAST = 20  # steps over which the table is the mean
HEADS = ("sparse layer", "busiest over mean", "idlest over mean", "entropy, nats", "dropped")


def experts(run: RunRecord) -> str:
    """The busiest expert by step, and a row for each sparse layer; nothing of a model without routers."""
    records = [(float(record["step"]), router) for record in run.steps if (router := _router(record))]
    chart = _busiest(records)
    if chart is None:
        return ""
    rows = []
    for layer in range(len(records[-1][1]["busiest"])):
        busiest, idlest, entropy, dropped = (
            fmean(router[key][layer] for _, router in records[-LAST:])
            for key in ("busiest", "idlest", "entropy", "dropped")
        )
        rows.append([str(layer + 1), f"{busiest:.2f}", f"{idlest:.2f}", f"{entropy:.2f}", percent(dropped)])
    said = html.note(f"Means of the last {min(LAST, len(records))} steps; 1 is a load like all others'.")
    table = html.table(HEADS, rows, numeric=len(HEADS) - 1)
    return html.section("experts", chart.title, html.curves(chart), table, said)


def _busiest(records: Sequence[tuple[float, Record]]) -> LineChart | None:
    points = [(step, float(max(router["busiest"]))) for step, router in records]
    lines = [ChartLine("", picture.smooth_if_many(points))]
    return picture.line_chart("Tokens of the busiest expert over the mean, by step", lines)


def _router(record: Record) -> Record:
    """What a step's line has of routers; nothing where it is not whole."""
    router = record.get("router")
    keys = ("busiest", "idlest", "entropy", "dropped")
    if not isinstance(router, dict) or not all(isinstance(router.get(key), list) for key in keys):
        return {}
    return router if router["busiest"] and len({len(router[key]) for key in keys}) == 1 else {}


def codec_error(run: RunRecord) -> str:
    """The error by step, and the steps of a mean; nothing of a run whose codec loses nothing."""
    points = [
        (float(record["step"]), float(record["codec_error"]))
        for record in run.steps
        if is_number(record.get("codec_error"))
    ]
    if not points:
        return ""
    mean = sum(error for _, error in points) / len(points)
    chart = picture.line_chart(
        "Error of the codec's sum, over the norm of the plain sum", [ChartLine("", points)]
    )
    said = html.note(
        f"A mean of {percent(mean)} in {len(points)} samples: a few elements of the gradient are added up plainly too,"
        " on the replicas of rank 0. With feedback, what is missing in one step comes in a later one."
    )
    return html.section(
        "codec",
        chart.title if chart else "Error of the codec's sum",
        html.curves(chart) if chart else "",
        said,
    )
