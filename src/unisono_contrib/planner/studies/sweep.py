"""Scaling studies: one size is varied, every point gets its best plan, and what breaks first is named.

Strong scaling keeps the global batch, weak scaling lets it grow with the devices (Amdahl, 1967; Gustafson, 1988).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.plan.grammar import meant
from unisono.planner.formatting import (
    Column,
    Description,
    Row,
    figure,
    figures,
    lines,
    many,
    parts,
    share,
    table,
)
from unisono.planner.machines.cluster import Cluster
from unisono.planner.model_kinds import Model, attending
from unisono.planner.search import Space, search
from unisono.planner.simulate import GIB, PlanResult
from unisono.spec.errors import UsageError
from unisono.spec.words import whole

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


def axis(text: str) -> Axis:
    """Reads `devices=8..1024` (doubling) or `global_batch=64,256,1024`. Raises UsageError."""
    key, equals, words = text.partition("=")
    if key not in KEYS:
        raise _unread(f"{text}: nothing to vary is called {key!r}{meant(key, KEYS)}",
                      f"devices=8..1024 or a list; one of {' '.join(KEYS)}")  # fmt: skip
    fix = f"{key}=8..1024 or {key}=8,64,512"
    if not (equals and words):
        raise _unread(f"{text} says no values for {key}", fix)
    first, dots, last = words.partition("..")
    numbers = [word.strip() for word in ((first, last) if dots else words.split(","))]
    if not all(map(whole, numbers)):
        raise _unread(f"{text}: {words!r} is no range or list of whole numbers", fix)
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
) -> list[Row]:
    """Every point with its best plan. sized(devices): the cluster. legal(space): what a plan must be there.

    efficiency: tokens per second of one device (of the whole cluster where that stays the same) beside the first
    point's. why_none: why a point has no plan. Keys that `base.held` says stay, but for `dp`, which fills the devices.
    Raises UsageError.
    """
    if weak and not over.grows:
        what, fix = "--weak lets the batch grow with the devices", "--sweep devices=8..1024"
        raise UsageError(what, where="--weak", fix=fix, code="C04")
    rows, first = list[Row](), 0.0
    for value, space in _spaces(base, over, sized, weak):
        held = replace(space.held, dp=-1, said=space.held.said - {"dp"}) if over.grows else space.held
        space = replace(space, held=held, legal=legal(space) if legal else space.legal)
        ranking, devices = search(space, top=1), space.cluster.devices
        row = {
            "value": value,
            "devices": devices,
            "global_batch": space.batch,
            "plan": None,
            "why_none": None,
        }
        if ranking.best:
            answer = ranking.best[0]
            pace = answer.rate / (devices if over.grows else 1)
            first = first or pace
            row |= {**figures(answer), "efficiency": pace / first, "waterfall": parts(answer)}
        rows.append(row if ranking.best else row | {"why_none": _nothing(space, ranking.nearest)})
    return rows


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
    transformer = attending(model)
    if transformer is None:
        raise UsageError("the samples of this kind of model have no context to vary", where="--sweep",
                         fix="--sweep global_batch=32..1024, or a model of kind gpt or moe", code="C04")  # fmt: skip
    return replace(transformer, context=context)


def _nothing(space: Space, nearest: PlanResult | None) -> str:
    if nearest is not None:
        return f"memory: the nearest plan is {nearest.verdict.short / GIB:.1f} GiB short"
    dealt = f"{space.batch} samples and {space.model.n_layer} layers to {space.cluster.devices} devices"
    return f"batch too small: no plan splits {dealt}"


def breaks(over: Axis, rows: Sequence[Row]) -> tuple[int | None, str]:
    """The first value under half of the first point's efficiency, or without a plan; and a sentence that says why."""
    priced = [row for row in rows if row["plan"]]
    if not priced:
        return rows[0]["value"], f"no plan fits anywhere: {rows[0]['why_none']}"

    def part(row: Row) -> str:
        share_ = f"{100 * row['efficiency']:.0f} % of the first point's efficiency"
        return f"{over.at(row['value'])}: {share_}; most is lost to: {row['bound']}"

    for row in rows:
        if row["plan"] is None and row["value"] > priced[0]["value"]:
            return row["value"], f"it ends {over.at(row['value'])}: {row['why_none']}"
        if row["plan"] and row["efficiency"] < _BREAKS:
            return row["value"], f"it breaks {part(row)}"
    if len(priced) == 1 or not over.grows:
        best = max(priced, key=lambda row: row["tokens_per_s"])
        return None, f"fastest {over.at(best['value'])}: {best['tokens_per_s']:,.0f} tokens/s"
    return None, f"it holds {part(priced[-1])}"


def describe(base: Space, over: Axis, rows: Sequence[Row], weak: bool = False) -> Description:
    """The key `sweep`, of which table and picture are made, and where it breaks."""
    at, says = breaks(over, rows)
    facts = {"key": over.key, "weak": weak, "points": list(rows), "breaks_at": at, "says": says}
    kind = ", weak scaling: the batch grows" if weak else ", strong scaling: the same batch"
    head = [
        ("cluster", f"{base.cluster.device.name}, priced as the software stack {base.stack.name} runs"),
        ("error", _trusted([row for row in rows if row["plan"]])),
        ("varied", over.key + (kind if over.grows else "")),
    ]
    columns = (
        Column(over.key, "value", many), Column("batch", "global_batch", many), Column("step s", "step_s", figure),
        Column("tokens/s", "tokens_per_s", many),
        Column("efficiency" if over.grows else "speed", "efficiency", share), Column("MFU", "mfu", share),
        Column("what binds; plan", "told"),
    )  # fmt: skip
    shown = [
        {
            **row,
            "told": row["why_none"] or f"{row['bound']}; {row['plan']} (micro_batch {row['micro_batch']})",
        }
        for row in rows
    ]
    return {"sweep": facts}, "\n".join([*lines(head), "", *table(columns, shown), "", says])


def _trusted(priced: Sequence[Row]) -> str:
    """How right the prices are, where they are known least."""
    if not priced:
        return "no plan, no price"
    worst = max(row["error_pct"] or 0.0 for row in priced)
    if not worst:
        return "no model of this kind has been held beside measurements"
    return f"right within about {worst:.0f} % on average, at the worst point"
