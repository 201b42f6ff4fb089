"""What collectives took, by axis, operation and size: waiting for the last rank apart from moving bytes.

The rate of a call is the bytes that a rank sends, over the time from when all ranks were there. It stands beside what
`unisono calibrate` has measured of the link, or beside the best of the axis where nobody has.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.report import calls, html
from unisono.report.analyse import steady
from unisono.report.calls import SharedCall, StepCalls
from unisono.report.collect import RunRecord
from unisono.report.stragglers import stragglers
from unisono.spec import words
from unisono.spec.words import is_number, percent

CLASSES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
"""Bytes that divide small calls from large ones."""
LAST = 4096
"""Steps that are looked at, the last of a long run."""
_LEAST = 64 << 10  # bytes from which on a call's rate is the link's, not that of starting


HEADS = (
    "axis", "operation", "size", "a step", "waiting a step", "moving a call", "quickest", "bytes/s", "of the link"
)  # fmt: skip
"""Of `cells`; the first three are names, the others figures."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Calls of one axis, operation and size. size: bytes, the least of its class; nbytes: of a call in the mean.

    a_step: how many calls, of a rank. waiting_s: of a rank and step, for the last rank. moving_s: of a call, from when
    all were there, the median; latency_s: the quickest of these. rate: bytes/s in the median. share: of `link`, what
    the link gave at best, in bytes/s; None for calls too small to fill it. of: `calibrated` or `best call`.
    """

    axis: str
    op: str
    size: int
    nbytes: float
    a_step: float
    waiting_s: float
    moving_s: float
    latency_s: float
    rate: float
    share: float | None
    link: float
    of: str


def table(run: RunRecord, met: Sequence[StepCalls] | None = None) -> list[CollectiveRow]:
    """The calls on several ranks of the run's steady steps, those first for which most was waited or moved. met: the
    run's steps, where they have been read already."""
    steps = steady(calls.steps(run.ranks, LAST) if met is None else met[-LAST:])
    by_kind: dict[tuple[str, str, int], list[SharedCall]] = {}
    for step in steps:
        for call in step.meetings:
            by_kind.setdefault((call.axis, call.op, _class_of(call.nbytes)), []).append(call)
    best: dict[str, float] = {}
    for (axis, _, _), alike in by_kind.items():
        best[axis] = max(best.get(axis, 0.0), *(_rate(call) for call in alike if call.nbytes >= _LEAST), 0.0)
    links = _links(run)
    rows = [_row(kind, alike, len(steps), links, best) for kind, alike in by_kind.items()]
    return sorted(rows, key=lambda row: -(row.waiting_s + row.a_step * row.moving_s))


def as_json(run: RunRecord) -> dict[str, Any]:
    """`collectives` and `stragglers`, lists of objects."""
    met = calls.steps(run.ranks, LAST)
    late = stragglers(met[1:])
    return {
        "collectives": [asdict(row) for row in table(run, met)],
        "stragglers": [asdict(each) for each in late],
    }


def cells(rows: Sequence[CollectiveRow]) -> list[list[str]]:
    """Rows in words, under `HEADS`."""
    return [
        [
            row.axis, row.op, _named(row.size), f"{row.a_step:.1f}", words.seconds(row.waiting_s),
            words.seconds(row.moving_s), words.seconds(row.latency_s),
            words.nbytes(row.rate) + "/s" if row.nbytes else "–", "–" if row.share is None else percent(row.share),
        ]
        for row in rows
    ]  # fmt: skip


def section(run: RunRecord) -> str:
    """The table, and who was waited for; "" of a run of one rank, or of before there were rows."""
    met = calls.steps(run.ranks, LAST)
    rows = table(run, met)
    if not rows:
        return ""
    late = "".join(html.note(each.says() + ".") for each in stragglers(met[1:]))
    of = "that `unisono calibrate` has measured" if rows[0].of == "calibrated" else "of the axis' best call"
    said = html.note(
        "Waiting is until the last rank was there, moving from then until the call was over. The link's rate is the one"
        f" {of}; small calls do not fill it."
    )
    return html.section(
        "collectives",
        "Collectives: waiting and moving",
        late,
        html.table(HEADS, cells(rows), numeric=6),
        said,
    )


def _row(
    kind: tuple[str, str, int],
    met: Sequence[SharedCall],
    steps: int,
    links: Sequence[tuple[int, float]],
    best: Mapping[str, float],
) -> CollectiveRow:
    axis, op, size = kind
    seen = [call for call in met if call.is_timed] or met
    moving = [call.moving for call in seen]
    nbytes = statistics.fmean(call.nbytes for call in met)
    rate = statistics.median(_rate(call) for call in seen)
    link = _link_of(met[0], links)
    of = "calibrated" if link else "best call"
    link = link or best.get(axis, 0.0)
    waits = sum(min(s, call.exposed[rank]) for call in met for rank, s in call.waiting.items())
    ranks = len({rank for call in met for rank in call.arrived})
    in_step = sum(len(call.arrived) for call in met) / (ranks * steps)
    share = rate / link if link and nbytes >= _LEAST else None
    return CollectiveRow(
        axis, op, size, nbytes, in_step, waits / (ranks * steps), statistics.median(moving), min(moving), rate, share,
        link, of,
    )  # fmt: skip


def _rate(call: SharedCall) -> float:
    return call.nbytes / call.moving if call.moving > 0 else 0.0


def _links(run: RunRecord) -> list[tuple[int, float]]:
    """(ranks that a level connects, bytes/s), the innermost first, where the run's prediction rests on what was
    measured here."""
    links = run.prediction.get("links") if run.prediction.get("calibrated") is True else None
    pairs = (
        [pair for pair in links if isinstance(pair, list) and len(pair) == 2]
        if isinstance(links, list)
        else []
    )
    return [
        (int(size), float(rate)) for size, rate in pairs if is_number(size) and is_number(rate) and size > 0
    ]


def _link_of(call: SharedCall, links: Sequence[tuple[int, float]]) -> float:
    """Bytes/s of the innermost level that connects all ranks of a call; 0 where none is known."""
    for size, rate in links:
        if len({rank // size for rank in call.arrived}) == 1:
            return rate
    return 0.0


def _class_of(nbytes: int) -> int:
    return max((least for least in CLASSES if least <= nbytes), default=0)


def _named(size: int) -> str:
    at = (0, *CLASSES).index(size)
    if not size:
        return f"below {words.nbytes(CLASSES[0])}"
    more = f" to {words.nbytes(CLASSES[at])}" if at < len(CLASSES) else " and more"
    return words.nbytes(size) + more
