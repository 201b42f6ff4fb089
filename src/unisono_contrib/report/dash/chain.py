"""Why a rank was late in a step: from the call at which the others waited back to what took it longer than them."""

import statistics
from collections.abc import Mapping
from typing import Any

from unisono.observe.span import PARTS
from unisono.report.calls import RankStep, SharedCall, StepCalls, rank_step
from unisono.report.collect import Record
from unisono.spec import words
from unisono.spec.words import is_number, seconds

_IN_TIME = 1e-3  # seconds that nobody has to explain
_LEAST = 0.05  # of the lateness, what is worth a line
_BESIDE = {
    "queue_s": "the queue for a core", "gc_s": "garbage collection", "save_s": "the save before it",
    "eval_s": "the validation before it",
}  # fmt: skip
_IDLE = ("comm_hidden", "comm_exposed", "wait")
_RANKS = 12


def chain(
    rank: int, step: int, lines: Mapping[int, Record], places: Mapping[int, Mapping[str, int]]
) -> dict[str, Any]:
    """The causes of one rank's lateness as `links` ({said, seconds, share}), nearest first, and the `ranks` of that
    call (rank, seconds later than the first one, seconds waited). lines: of all ranks, of that step."""
    seen = {
        r: step_of
        for r, line in lines.items()
        if (step_of := rank_step(r, line)) is not None and step_of.calls
    }
    mine = lines.get(rank)
    if mine is None:
        return {
            "rank": rank,
            "step": step,
            "late_s": None,
            "links": [],
            "ranks": [],
            "said": "Nothing was written of it.",
        }
    met = StepCalls(step, seen, places)
    call = _apart(met, rank)
    late = met.lateness.get(rank) if seen else None
    links = [_met(rank, late or 0.0, call)] if call is not None and late is not None else []
    if late is None or late > _IN_TIME:  # beside those who met it: other stages have other work
        peers = {r: lines[r] for r in call.arrived} if call is not None else lines
        links += _longer(rank, peers, late)
        links += _modules(rank, {r: seen[r] for r in peers if r in seen})
    used = {axis for place in places.values() for axis, at in place.items() if at}
    place = " ".join(f"{axis}={at}" for axis, at in places.get(rank, {}).items() if axis in used)
    return {
        "rank": rank, "step": step, "late_s": late, "place": place, "links": links,
        "ranks": _ranks(call) if call is not None else [], "said": _sentence(rank, step, late, links),
    }  # fmt: skip


def _apart(met: StepCalls, rank: int) -> SharedCall | None:
    """The call that `StepCalls.lateness` speaks of, of those that this rank took part in."""
    calls = [call for call in met.meetings if rank in call.arrived] if met.ranks else []
    return max(calls, key=lambda call: max(call.waiting.values()), default=None)


def _met(rank: int, late: float, call: SharedCall) -> dict[str, Any]:
    what = words.traffic(call.axis, call.op) + (f" of {call.module}" if call.module else "")
    others = [waited for other, waited in call.waiting.items() if other != rank]
    if call.last == rank and others:
        who = f"{len(others)} ranks" if len(others) > 1 else "the other rank"
        said = f"came last to {what}, in {call.phase}: {who} waited {seconds(max(others))} at most"
    else:
        said = f"came to {what}, in {call.phase}, {seconds(call.waiting[rank])} before rank {call.last}, the last"
    return {"said": said, "seconds": late, "kind": "call"}


def _longer(rank: int, lines: Mapping[int, Record], late: float | None) -> list[dict[str, Any]]:
    """Parts of the step, and what its line says beside them, that took longer than on the median of the others."""
    names = {part: words.PART_NAMES[part] for part in PARTS if part not in _IDLE}
    rows = [(name, _beyond(rank, lines, key, True), "part") for key, name in names.items()]
    rows += [(name, _beyond(rank, lines, key, False), "beside") for key, name in _BESIDE.items()]
    least = _LEAST * max(abs(late or 0.0), 1e-3)
    return [
        {
            "said": f"longer in {name} than the median of the others",
            "seconds": more,
            "kind": kind,
        }
        for name, more, kind in sorted(rows, key=lambda row: -row[1])
        if more > least
    ][:4]


def _beyond(rank: int, lines: Mapping[int, Record], key: str, is_part: bool) -> float:
    values: dict[int, Any] = {
        r: (line.get("time") or {}).get(key) if is_part else line.get(key) for r, line in lines.items()
    }
    mine, others = values.get(rank), [value for r, value in values.items() if r != rank and is_number(value)]
    return float(mine) - statistics.median(others) if mine is not None and is_number(mine) and others else 0.0


def _modules(rank: int, seen: Mapping[int, RankStep]) -> list[dict[str, Any]]:
    """The modules that took this rank longest beside the others that timed theirs in this step."""
    mine = seen[rank].modules if rank in seen else {}
    rows = []
    for name, pair in mine.items():
        others = [
            sum(other.modules[name]) for r, other in seen.items() if r != rank and name in other.modules
        ]
        more = sum(pair) - statistics.median(others) if others else 0.0
        if more > 1e-3:
            rows.append(
                {
                    "said": f"longer in module {name} than elsewhere",
                    "seconds": more,
                    "kind": "module",
                }
            )
    return sorted(rows, key=lambda link: -link["seconds"])[:3]


def _ranks(call: SharedCall) -> list[list[Any]]:
    first = min(call.arrived.values())
    latest = sorted(call.arrived, key=lambda r: -call.arrived[r])[:_RANKS]
    return [[r, call.arrived[r] - first, call.waiting[r]] for r in latest]


def _sentence(rank: int, step: int, late: float | None, links: list[dict[str, Any]]) -> str:
    if late is None:
        return f"Rank {rank}, step {step}: its line holds no collectives."
    how = f"{seconds(late)} late" if late > 0 else f"{seconds(-late)} early" if late < 0 else "in time"
    cause = next((f": {seconds(e['seconds'])} {e['said']}" for e in links if e["kind"] != "call"), "")
    return f"Rank {rank} was {how} in step {step}{cause}."
