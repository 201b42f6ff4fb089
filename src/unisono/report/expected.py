"""What a run was expected to take beside what it took: `prediction.json` and the ranks' own clocks, part by part."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from unisono.report import html, picture
from unisono.report.analyse import TimeShares, peak_memory
from unisono.report.collect import RunRecord
from unisono.report.picture import BarChart, BarRow
from unisono.spec import words
from unisono.spec.words import percent

# What a rank's clock counts under each part of a prediction, and what both are called.
_MEASURED: Mapping[str, tuple[str, ...]] = {
    "compute": ("forward", "backward"),
    "wait": ("wait",),
    "optim": ("optim",),
    "other": ("data", "other"),
}
_NAMES: Mapping[str, str] = {
    "compute": "compute",
    "wait": "waiting, bubble",
    "optim": "optimiser",
    "other": "other",
}
COLOURS: Mapping[str, str] = {
    "compute": "forward",
    "comm": "comm_exposed",
}  # others are called as their parts are


@dataclass(frozen=True)
class ExpectedPart:
    """One part of a step, in seconds; `part` is as in `planner.predict`."""

    part: str
    predicted: float
    measured: float

    @property
    def name(self) -> str:
        axis = self.part.removeprefix("comm").strip()
        if self.part.startswith("comm"):
            return words.exposed(axis) if axis else "communication"
        return _NAMES[self.part]

    @property
    def colour(self) -> str:
        kind = self.part.split()[0]
        return COLOURS.get(kind, kind)


@dataclass(frozen=True)
class Beside:
    """Prediction and measurement of a run; memory in MiB, measured None where nothing comparable was. error: relative;
    None where no price of such a model was ever held beside a measurement."""

    lines: tuple[ExpectedPart, ...]
    cluster: str
    calibrated: bool
    error: float | None
    mem_predicted: float
    mem_measured: float | None

    @property
    def predicted(self) -> float:
        return sum(line.predicted for line in self.lines)

    @property
    def measured(self) -> float:
        return sum(line.measured for line in self.lines)

    @property
    def sentence(self) -> str:
        """Both times, and how far apart they are; of another machine's prices, whose they are comes first."""
        if not self.calibrated:
            return (
                f"Nobody has measured this machine. The built-in cluster {self.cluster} would take"
                f" {words.seconds(self.predicted)} a step; this run took {words.seconds(self.measured)}."
            )
        within = "" if self.error is None else f" ± {percent(self.error)}"
        return (
            f"Predicted {words.seconds(self.predicted)}{within} a step, measured "
            f"{words.seconds(self.measured)}: the prediction is {apart(self.predicted, self.measured)}."
        )

    @property
    def trust(self) -> str:
        """Where the prediction comes from, and how to get a better one."""
        if self.calibrated:
            unsure = (
                "" if self.error is not None else " Those of this kind of model were never held beside any."
            )
            return f"The prices were measured on this machine ({self.cluster}).{unsure}"
        return (
            "unisono calibrate measures this machine; until then the prices are another's, and their memory is without"
            " what Python and torch hold."
        )


def beside(run: RunRecord, time_shares: Sequence[TimeShares]) -> Beside | None:
    """Compare a run with the prediction in its folder, None without one. time_shares: the ranks' mean steps."""
    prediction, parts = run.prediction, run.prediction.get("parts")
    if not time_shares or not isinstance(parts, dict) or not all(words.is_number(v) for v in parts.values()):
        return None
    error = prediction.get("error_pct")
    if not words.is_number(prediction.get("mem_mib")) or not (error is None or words.is_number(error)):
        return None
    known = {part: float(s) for part, s in parts.items() if part in _NAMES or str(part).startswith("comm ")}
    measured = _measured(run, time_shares)
    order = [
        "compute",
        *dict.fromkeys(p for p in (*known, *measured) if p.startswith("comm")),
        "wait",
        "optim",
        "other",
    ]
    lines = tuple(
        ExpectedPart(part, known.get(part, 0.0), measured.get(part, 0.0))
        for part in order
        if known.get(part, 0.0) > 0 or measured.get(part, 0.0) > 0
    )
    sizes = [size for _, size in peak_memory(run)]
    on_host = not any(trace.on_gpu for trace in run.traces)
    return Beside(
        lines,
        str(prediction.get("cluster", "")),
        prediction.get("calibrated") is True,
        None if error is None else error / 100,
        float(prediction["mem_mib"]),
        max(sizes) if sizes and on_host else None,
    )


def _measured(run: RunRecord, time_shares: Sequence[TimeShares]) -> dict[str, float]:
    """Seconds of a mean rank's step. Exposed communication is told apart by axis as it was in the traced steps."""

    def mean(*parts: str) -> float:
        return statistics.fmean(sum(share.parts.get(part, 0.0) for part in parts) for share in time_shares)

    measured = {part: mean(*values) for part, values in _MEASURED.items()}
    axes: dict[str, float] = {}
    for trace in run.traces:
        for span in trace.spans:
            if span.kind == "comm" and span.tags.get("exposed", True):
                axis = f"comm {span.tags.get('axis', '')}".strip()
                axis = (
                    "wait" if axis == "comm pp" else axis
                )  # as a prediction counts what stages tell each other
                axes[axis] = axes.get(axis, 0.0) + (span.stop_ns - span.start_ns)
    whole, exposed = sum(axes.values()), mean("comm_exposed")
    if not whole:
        return {**measured, "comm": exposed}
    for axis, ns in axes.items():
        measured[axis] = measured.get(axis, 0.0) + exposed * ns / whole
    return measured


def apart(predicted: float, measured: float) -> str:
    """`12 % too long`, `4.0 % too short`."""
    if measured <= 0:
        return "not comparable"
    off = predicted / measured - 1
    return f"{percent(abs(off))} too {'long' if off >= 0 else 'short'}"


def chart(both: Beside) -> BarChart:
    """Both steps, cut into the same parts."""
    prices = "measured on this machine" if both.calibrated else f"of the built-in cluster {both.cluster}"
    off = apart(both.predicted, both.measured)
    pairs = [("predicted", [(part, part.predicted) for part in both.lines], both.predicted)]
    pairs.append(("measured", [(part, part.measured) for part in both.lines], both.measured))
    bars = [
        bar
        for row, (_, parts, _) in enumerate(pairs)
        for bar in picture.stacked(
            row, [(s, p.colour, words.seconds(s), f"{p.name}: {words.seconds(s)}") for p, s in parts]
        )
    ]
    return BarChart(
        f"Predicted and measured: {off}, with prices {prices}",
        [BarRow(name, value=words.seconds(seconds)) for name, _, seconds in pairs],
        bars,
        max(both.predicted, both.measured) or 1.0,
        keys={part.colour: group(part) for part in both.lines},
    )


def section(run: RunRecord, time_shares: Sequence[TimeShares]) -> str:
    """The page's section; "" without a prediction."""
    problem = run.prediction.get("problem")
    if isinstance(problem, str):
        said = f"<p>{escape(f'There was no prediction: {problem}')}</p>"
        return html.section("expected", "Predicted and measured", said)
    both = beside(run, time_shares)
    if both is None:
        return ""
    table = html.table(("part of a step", "predicted", "measured", "difference"), rows(both), numeric=3)
    return html.section(
        "expected",
        "Predicted and measured",
        f"<p>{escape(both.sentence)}</p>{html.bars(chart(both))}<div class='parts'>{table}</div>",
        html.note(
            f"{both.trust} Differences are predicted less measured. Communication is counted here where nothing else"
            " is done meanwhile: dp adds up gradients of replicas, shard gathers parameters and adds up gradients, tp"
            " exchanges activations."
        ),
    )


def rows(both: Beside) -> list[list[str]]:
    """The table: parts, their sum, and memory."""
    lines = [
        [line.name, words.seconds(line.predicted), words.seconds(line.measured), _less(line)]
        for line in both.lines
    ]
    step = words.seconds(both.predicted), words.seconds(both.measured)
    lines.append(["step", *step, _percent(both.predicted, both.measured)])
    if both.mem_measured is not None:
        sizes = words.mebibytes(both.mem_predicted), words.mebibytes(both.mem_measured)
        lines.append(["peak memory", *sizes, _percent(both.mem_predicted, both.mem_measured)])
    return lines


def group(line: ExpectedPart) -> str:
    """What a colour means: communication is one, whatever its axis."""
    return "communication" if line.colour == "comm_exposed" else line.name


def _less(line: ExpectedPart) -> str:
    off = line.predicted - line.measured
    return f"{'−' if off < 0 else '+'}{words.seconds(abs(off))}"


def _percent(predicted: float, measured: float) -> str:
    if measured <= 0:
        return "–"
    off = predicted / measured - 1
    return f"{'−' if off < 0 else '+'}{percent(abs(off))}"
