"""Scaling studies: one size is varied, every point gets its best plan, and what breaks first is named.

Strong scaling keeps the global batch, weak scaling lets it grow with the devices (Amdahl, 1967; Gustafson, 1988).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from unisono.plan.grammar import meant
from unisono.planner.machines.cluster import Cluster
from unisono.planner.priced import Model
from unisono.planner.search import Space, search
from unisono.planner.simulate import GIB, Answer
from unisono.planner.tell import Column, Told, bound, figure, lines, many, share, table, waterfall
from unisono.planner.work.transformer import Transformer
from unisono.spec.errors import UsageError

KEYS = ("devices", "nodes", "global_batch", "micro_batch", "context")
_BREAKS = 0.5  # efficiency below which a point is called broken
_MOST = 64  # points


@dataclass(frozen=True, slots=True)
class Axis:
    """What is varied."""

    key: str
    values: tuple[int, ...]

    @property
    def grows(self) -> bool:
        """Whether points differ in their number of devices, so that efficiency is counted by device."""
        return self.key in ("devices", "nodes")

    def at(self, value: int) -> str:
        """In a sentence."""
        return f"at {self.key.replace('_', ' ')} {value:,}"


@dataclass(frozen=True, slots=True)
class Point:
    """answer: of the best plan; None where there is none, and then `why` says it. efficiency: tokens per second of one
    device (of the whole cluster where that stays the same) beside the first point's."""

    value: int
    space: Space
    answer: Answer | None
    efficiency: float | None = None
    why: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        if self.answer is None:
            return 0.0
        return self.answer.rate

    @property
    def devices(self) -> int:
        return self.space.cluster.devices


@dataclass(frozen=True, slots=True)
class Sweep:
    axis: Axis
    weak: bool
    points: tuple[Point, ...]


def axis(text: str) -> Axis:
    """Reads `devices=8..1024` (doubling) or `global_batch=64,256,1024`. Raises UsageError."""
    key, equals, given = text.partition("=")
    if key not in KEYS:
        raise _unread(f"{text}: nothing to vary is called {key!r}{meant(key, KEYS)}",
                      f"devices=8..1024 or a list; one of {' '.join(KEYS)}")  # fmt: skip
    fix = f"{key}=8..1024 or {key}=8,64,512"
    if not (equals and given):
        raise _unread(f"{text} says no values for {key}", fix)
    first, dots, last = given.partition("..")
    numbers = [word.strip() for word in ((first, last) if dots else given.split(","))]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in numbers):
        raise _unread(f"{text}: {given!r} is no range or list of whole numbers", fix)
    values = sorted({int(word) for word in numbers})
    if dots:
        low, high = map(int, numbers)
        if low > high:
            raise _unread(f"{text}: the range ends before it begins", f"{key}={last}..{first}")
        values = [low * 2**n for n in range(high.bit_length()) if low * 2**n <= high]
    if len(values) > _MOST:
        raise _unread(f"{text}: more than {_MOST} points", fix)
    return Axis(key, tuple(values))


def _unread(what: str, fix: str) -> UsageError:
    return UsageError(f"--sweep {what}", where="--sweep", fix=fix, code="C04")


def sweep(
    base: Space,
    over: Axis,
    sized: Callable[[int], Cluster],
    *,
    weak: bool = False,
    legal: Callable[[Space], Callable[[Any], bool]] | None = None,
) -> Sweep:
    """Every point with its best plan. sized(devices): the cluster. legal(space): what a plan must be there.

    Keys that `base.held` says stay, but for `dp`, which fills the devices. Raises UsageError.
    """
    if weak and not over.grows:
        raise UsageError(
            "--weak lets the batch grow with the devices",
            where="--weak",
            fix="--sweep devices=8..1024",
            code="C04",
        )
    points: list[Point] = []
    first: Point | None = None
    for value, space in _spaces(base, over, sized, weak):
        held = replace(space.held, dp=-1, said=space.held.said - {"dp"}) if over.grows else space.held
        space = replace(space, held=held, legal=legal(space) if legal else space.legal)
        found = search(space, top=1)
        if not found.best:
            points.append(Point(value, space, None, why=_nothing(space, found.nearest)))
            continue
        point = Point(value, space, found.best[0])
        first = first or point
        per = (point.devices / first.devices) if over.grows else 1.0
        points.append(replace(point, efficiency=point.rate / first.rate / per))
    return Sweep(over, weak, tuple(points))


def _spaces(
    base: Space, over: Axis, sized: Callable[[int], Cluster], weak: bool
) -> Iterator[tuple[int, Space]]:
    for value in over.values:
        if over.key == "global_batch":
            yield value, replace(base, batch=value)
        elif over.key == "micro_batch":
            yield value, replace(base, micro_batch=value)
        elif over.key == "context":
            yield value, replace(base, model=_with_context(base.model, value))
        elif over.grows:
            devices = value * (base.cluster.node if over.key == "nodes" else 1)
            batch = base.batch * value / over.values[0] if weak else base.batch
            yield value, replace(base, cluster=sized(devices), batch=round(batch))


def _with_context(model: Model, context: int) -> Model:
    if not isinstance(model, Transformer):
        raise UsageError("the samples of this kind of model have no context to vary", where="--sweep",
                         fix="--sweep global_batch=32..1024, or a model of kind gpt or moe", code="C04")  # fmt: skip
    return replace(model, context=context)


def _nothing(space: Space, nearest: Answer | None) -> str:
    if nearest is None:
        return (
            f"batch too small: no plan deals {space.batch} samples and {space.model.n_layer} layers to"
            f" {space.cluster.devices} devices"
        )
    return f"memory: the nearest plan is {nearest.verdict.short / GIB:.1f} GiB short"


def breaks(study: Sweep) -> tuple[Point | None, str]:
    """The first point under half of the first one's efficiency, or without a plan; and a sentence that says why."""
    priced = [point for point in study.points if point.answer is not None]
    if not priced:
        return study.points[0], f"no plan fits anywhere: {study.points[0].why}"
    first, last = priced[0], priced[-1]
    for point in study.points:
        at = study.axis.at(point.value)
        if point.answer is None and point.value > first.value:
            return point, f"it ends {at}: {point.why}"
        if point.efficiency is not None and point.efficiency < _BREAKS:
            return point, f"it breaks {at}: {_share(point)}; most is lost to: {_bound(point)}"
    if last is first or not study.axis.grows:
        best = max(priced, key=lambda point: point.rate)
        return None, f"fastest {study.axis.at(best.value)}: {best.rate:,.0f} tokens/s"
    return None, f"it holds {study.axis.at(last.value)}: {_share(last)}; most is lost to: {_bound(last)}"


def _share(point: Point) -> str:
    return f"{100 * (point.efficiency or 0.0):.0f} % of the first point's efficiency"


def _bound(point: Point) -> str:
    return bound(point.answer) if point.answer is not None else "nothing"


def told(study: Sweep) -> Told:
    """A plain row for each point, of which JSON, table and picture are made, and where it breaks."""
    (at, says), key = breaks(study), study.axis.key
    facts = {
        "key": key,
        "weak": study.weak,
        "points": [_row(point) for point in study.points],
        "breaks_at": at.value if at else None,
        "says": says,
    }
    kind = ", weak scaling: the batch grows" if study.weak else ", strong scaling: the same batch"
    space = study.points[0].space
    head = [
        ("cluster", f"{space.cluster.device.name}, priced as the software stack {space.stack.name} runs"),
        ("error", _trusted(study)),
        ("varied", key + (kind if study.axis.grows else "")),
    ]
    columns = (
        Column(key, "value", many), Column("batch", "global_batch", many),
        Column("step s", "step_s", figure),
        Column("tokens/s", "tokens_per_s", many),
        Column("efficiency" if study.axis.grows else "speed", "efficiency", share), Column("MFU", "mfu", share),
        Column("what binds; plan", "told"),
    )  # fmt: skip
    rows = [{**row, "told": _named(row)} for row in facts["points"]]
    return {"sweep": facts}, "\n".join([*lines(head), "", *table(columns, rows), "", says])


def _named(row: dict[str, Any]) -> str:
    return row["why_none"] or f"{row['bound']}; {row['plan']} (micro_batch {row['micro_batch']})"


def _row(point: Point) -> dict[str, Any]:
    space, got = point.space, point.answer
    row = {"value": point.value, "devices": space.cluster.devices, "global_batch": space.batch, "plan": None,
           "why_none": point.why or None}  # fmt: skip
    if got is None:
        return row
    return row | {
        "plan": str(got.question.plan),
        "micro_batch": got.question.micro_batch,
        "step_s": got.price.step,
        "tokens_per_s": point.rate,
        "efficiency": point.efficiency,
        "mfu": got.mfu,
        "error_pct": got.error_pct,
        "mem_gib": got.verdict.memory.total / GIB,
        "exposed_comm_s": got.price.exposed,
        "bound": bound(got),
        "waterfall": [{"what": what, "seconds": seconds} for what, seconds in waterfall(got)],
    }


def _trusted(study: Sweep) -> str:
    """How right the prices are, where they are known least."""
    answers = [point.answer for point in study.points if point.answer is not None]
    if not answers:
        return "no plan, no price"
    worst = max(answers, key=lambda answer: answer.error_pct or 0.0)
    return f"{worst.trusted}{', at the worst point' if worst.error_pct is not None else ''}"
