"""Placed actions and spans, each from the other: what was simulated is drawn and traced as what was measured is."""

from collections.abc import Iterable, Mapping, Sequence

from unisono.observe.span import Span
from unisono.observe.trace import TraceLane
from unisono.programs.draw import several_stages
from unisono.programs.pipeline import Action, Kind, Placed
from unisono.report.picture import Bar
from unisono.spec import words

_KINDS: Mapping[str, Kind] = {"forward": "F", "backward": "B", "weight": "W"}
_WORDS = {kind: word for word, kind in _KINDS.items()}


def computed(spans: Iterable[Span], row: int | None = None) -> list[Placed]:
    """The computations among the spans of one rank, in seconds of their clock. row: the rank's row of the timetable,
    its stage if not given."""
    placed = []
    for span in spans:
        half = "weight" if span.tags.get("op") == "weights" else span.kind
        kind, micro, stage = _KINDS.get(half), span.tags.get("micro"), span.tags.get("stage", row)
        if kind is not None and isinstance(micro, int) and isinstance(stage, int):
            action = Action(kind, stage, micro)
            place = row if row is not None else stage
            placed.append(Placed(place, action, span.start_ns * 1e-9, span.stop_ns * 1e-9))
    return placed


def from_zero(placed: Sequence[Placed]) -> list[Placed]:
    """The same with the first start at zero, in order of starts."""
    begin = min((p.start for p in placed), default=0.0)
    shifted = (Placed(p.row, p.action, p.start - begin, p.stop - begin) for p in placed)
    return sorted(shifted, key=lambda p: (p.start, p.row))


def bars(placed: Sequence[Placed]) -> list[Bar]:
    """A bar per action, with its micro-batch on it, and its stage too where rows own several."""
    several = several_stages(placed)
    return [
        Bar(
            p.row,
            p.start,
            p.stop,
            _WORDS[p.action.kind],
            f"{p.action.micro}/{p.action.stage}" if several else str(p.action.micro),
            f"{words.PART_NAMES[_WORDS[p.action.kind]]}, micro-batch {p.action.micro}, stage {p.action.stage}: "
            f"at {words.seconds(p.start)} for {words.seconds(p.stop - p.start)}",
        )
        for p in placed
    ]


def lanes(
    placed: Sequence[Placed], names: Sequence[str], after: Sequence[tuple[str, float]] = ()
) -> list[TraceLane]:
    """One lane a row of the timetable. after: (part, seconds) of what every row does when the last one has ended."""
    end = max((p.stop for p in placed), default=0.0)
    drawn = []
    for row, name in enumerate(names):
        spans = [_span(p) for p in placed if p.row == row]
        at = end
        for part, seconds in after:
            tags = {"axis": part[5:], "op": "exposed"} if part.startswith("comm ") else {}
            spans.append(Span(part.split()[0], round(at * 1e9), round((at + seconds) * 1e9), tags))
            at += seconds
        drawn.append(TraceLane(name, spans))
    return drawn


def _span(p: Placed) -> Span:
    tags = {"micro": p.action.micro, "stage": p.action.stage}
    return Span(_WORDS[p.action.kind], round(p.start * 1e9), round(p.stop * 1e9), tags)
