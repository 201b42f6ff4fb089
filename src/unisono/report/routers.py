"""How alike the experts of a model are in load: what its routers told, step by step."""

from collections.abc import Sequence
from statistics import fmean

from unisono.report import html, picture
from unisono.report.collect import Record, RunRecord
from unisono.report.picture import ChartLine, LineChart
from unisono.spec.words import percent

LAST = 20  # steps over which the table is the mean
HEADS = ("sparse layer", "busiest over mean", "idlest over mean", "entropy, nats", "dropped")


def section(run: RunRecord) -> str:
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
    many = len(points) > 100
    smooth = picture.smooth(points, max(10, len(points) // 50)) if many else points
    return picture.line_chart("Tokens of the busiest expert over the mean, by step", [ChartLine("", smooth)])


def _router(record: Record) -> Record:
    """What a step's line has of routers; nothing where it is not whole."""
    router = record.get("router")
    keys = ("busiest", "idlest", "entropy", "dropped")
    if not isinstance(router, dict) or not all(isinstance(router.get(key), list) for key in keys):
        return {}
    return router if router["busiest"] and len({len(router[key]) for key in keys}) == 1 else {}
