"""What is seen of the ranks of a run, for a person and for `--json`. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.launch.inspect import InspectedRank
from unisono.launch.rank_status import RankStatus
from unisono.launch.run.verdict import listed
from unisono.spec.errors import UnisonoError
from unisono.spec.frames import is_foreign

Row = tuple[str, str]
_LINES = 4  # of a stack
_STATES = {
    "runs": "outside of any collective",
    "stopped": "stopped",
    "silent": "does not answer",
    "gone": "has gone",
}


def report(
    folder: Path, ranks: Sequence[InspectedRank], error: UnisonoError | None, waited: float, limit: float
) -> tuple[dict[str, Any], list[str]]:
    """(the object of --json, lines)."""
    calls = side_by_side(ranks)
    cause = error.what if error is not None else calm(ranks, waited, limit)
    facts = {
        "run": str(folder.parent if folder.name == "alive" else folder),
        "stands": [_facts(view) for view in ranks],
        "calls": calls,
        "waited": waited,
        "limit": limit,
        "cause": cause,
        "remedy": error.fix if error is not None else "",
        "culprit": error.rank if error is not None else None,
        "error": error.as_dict() if error is not None else None,
        "pass": error is None,
    }
    return facts, _lines(facts, ranks, error)


def _lines(facts: Mapping[str, Any], ranks: Sequence[InspectedRank], error: UnisonoError | None) -> list[str]:
    world = next((view.who.world for view in ranks if view.who is not None), len(ranks))
    hosts = sorted({view.who.host for view in ranks if view.who is not None})
    rows = [("run", f"{facts['run']}: {world} rank{'s' * (world != 1)} on {', '.join(hosts)}")]
    if len(ranks) < world:
        others = f"{world - len(ranks)} of them are on other hosts: ask there, or unisono.init(folder=...)"
        rows.append(("note", others))
    rows += _stacks(ranks)
    rows += [row for group in facts["calls"] for row in _call_rows(group, error is None)]
    rows += [("healthy", facts["cause"])] if error is None else []
    wide = max(len(head) for head, _ in rows) + 2
    here = f"{Path.cwd()}/"
    lines = [f"{head:<{wide}}{text}".replace(here, "") for head, text in rows]
    return lines if error is None else [*lines, error.render()]


def calm(ranks: Sequence[InspectedRank], waited: float, limit: float) -> str:
    """Why nothing is wrong."""
    since = [view.since for view in ranks if view.since is not None]
    if waited >= 1.0:
        may = f"by the run's pace they may for {limit:.0f} s (--patience SECONDS)"
        return f"ranks have waited {waited:.0f} s, and {may}"
    if not since:
        return "no step is made yet, and ranks move"
    step = max(view.status.step for view in ranks)
    return f"all ranks stepped {max(since):.1f} s ago, step {step}"


def _facts(view: InspectedRank) -> dict[str, Any]:
    status, who = view.status, view.who
    return {
        "rank": status.rank, "state": status.state, "host": status.host, "pid": who.pid if who is not None else None,
        "doing": status.doing(), "place": status.place, "idle": status.idle, "step": status.step, "since": view.since,
        "kernel": dict(view.kernel), "answered": view.spoke,
        "stack": [f"{file}:{line} in {name}" for file, line, name in view.frames],
    }  # fmt: skip


# Stacks, folded.


def _stacks(ranks: Sequence[InspectedRank]) -> list[Row]:
    """A row for all ranks that stand alike, and their own lines beneath."""
    alike: dict[tuple[str, ...], list[InspectedRank]] = {}
    for view in ranks:
        alike.setdefault((view.status.place, _how(view.status), *_users_lines(view)), []).append(view)
    rows = []
    for (place, how, *places), group in alike.items():
        words = f"{', '.join(word for word in (place, how) if word)}{_pace(group)}"
        rows.append((listed([view.status.rank for view in group]), words))
        rows += [("", line) for line in (*places, *_kernel(group))]
    return rows


def _how(status: RankStatus) -> str:
    doing = status.doing()
    if status.state in ("waits", "ended"):
        return f"waits in {doing or 'a collective'}"
    return _STATES.get(status.state, status.state) + (f", in {doing}" if doing else "")


def _users_lines(view: InspectedRank) -> list[str]:
    """The user's lines that called the one which is shown, then the innermost of all if that is another."""
    places = [(str(file), f"{file}:{line} in {name}") for file, line, name in view.frames]
    users = [place for file, place in places if not is_foreign(file) and not file.startswith("<")]
    rest = [f"from {place}" for place in users if place != view.status.place]
    inner = [f"at   {places[0][1]}"] if places and places[0][1] != view.status.place else []
    return [*inner, *rest[: _LINES - 1]]


def _pace(group: Sequence[InspectedRank]) -> str:
    idle = [view.status.idle for view in group if view.spoke]
    since = [view.since for view in group if view.since is not None]
    words = f", {min(idle):.0f} s" if idle and min(idle) >= 1 else ""
    steps = sorted({view.status.step for view in group if view.spoke})
    if steps:
        words += f"; step {'-'.join(map(str, {steps[0]: 0, steps[-1]: 0}))}"
    return words + (f", {max(since):.1f} s ago" if since else "")


def _kernel(group: Sequence[InspectedRank]) -> list[str]:
    """What the kernel says of each, folded."""
    by_words: dict[str, list[str]] = {}
    for view in group:
        if view.kernel and view.who is not None:
            where, tracer = view.kernel.get("in"), view.kernel.get("tracer")
            words = str(view.kernel.get("state")) + (f" in {where}" if where else "")
            words += f", traced by process {tracer}" if tracer else ""
            by_words.setdefault(words, []).append(f"{view.who.pid} on {view.who.host}")
    return [
        f"{words}: process{'es' * (len(pids) > 1)} {', '.join(pids[:8])}{' …' * (len(pids) > 8)}"
        for words, pids in by_words.items()
    ]


# Operations, side by side.


def side_by_side(ranks: Sequence[InspectedRank]) -> list[dict[str, Any]]:
    """Return the last call of each rank in each group: its number, operation, line, and whether it is over."""
    labels = dict.fromkeys(label for view in ranks for label in view.calls or ())
    return [_latest(label, ranks) for label in labels]


def _latest(label: str, ranks: Sequence[InspectedRank]) -> dict[str, Any]:
    groups = {view.status.rank: view.calls[label] for view in ranks if view.calls and label in view.calls}
    first, latest = next(iter(groups.values())), {}
    for rank, group in groups.items():
        number = max(group.calls, key=int, default=None)
        if number is not None:
            call = group.calls[number]
            latest[rank] = {
                "number": int(number), "op": call.op, "over": call.over, "part": call.part, "place": call.place,
            }  # fmt: skip
    begun = {rank: group.begun for rank, group in groups.items() if group.begun is not None}
    return {"group": label, "axis": first.axis, "ranks": first.ranks, "begun": begun, "latest": latest}


def _call_rows(group: Mapping[str, Any], healthy: bool) -> Iterable[Row]:
    """A row for each call that some of the ranks are at; nothing of groups in which nobody waits, if all is well."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, call in group["latest"].items():
        alike.setdefault((call["number"], call["op"], call["over"], call["place"]), []).append(rank)
    counts: dict[int, list[int]] = {}
    for rank, number in group["begun"].items():
        counts.setdefault(number, []).append(rank)
    if (healthy and all(over for _, _, over, _ in alike)) or not (alike or len(counts) > 1):
        return
    begun = ", ".join(f"{number} on {listed(ranks)}" for number, ranks in counts.items())
    yield (
        "calls",
        f"of {group['axis'] or group['group']}, {listed(group['ranks'])}"
        + (f": begun {begun}" if begun else ""),
    )
    for (number, op, over, place), ranks in sorted(alike.items(), key=lambda item: item[1]):
        yield listed(ranks), f"#{number} {op}{'' if over else ', under way'}, {place}"
