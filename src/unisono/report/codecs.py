"""How far a codec's sums were off the plain ones, where a run sampled them."""

from unisono.report import html, picture
from unisono.report.collect import RunRecord
from unisono.report.picture import ChartLine
from unisono.spec.words import is_number, percent


def section(run: RunRecord) -> str:
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
