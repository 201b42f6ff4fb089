"""Whether a timetable computes every micro-batch once, in an order that ends."""

from collections import deque
from collections.abc import Sequence

from unisono.programs.pipeline import COMPUTE, RECEIVES, SENDS, Action, Timetable, arrives_as, lower, needs


def check(timetable: Timetable) -> list[str]:
    """Everything wrong with a timetable, in words; an empty list if it computes every micro-batch once and ends.

    Looked at: each F and B (and W, where there are any) exactly once per (stage, micro-batch) and on the row that
    owns the stage; B after F, W after B; and, by playing the lowered rows with buffered sends and waiting receives,
    that no row waits for ever.
    """
    problems = _miscounted(timetable)
    if problems:
        return problems
    problems += _disordered(timetable)
    problems += [f"row {row} waits for ever at {action}" for row, action in _stuck(lower(timetable))]
    return problems


def _miscounted(timetable: Timetable) -> list[str]:
    problems: list[str] = []
    if any(not 0 <= owner < len(timetable.rows) for owner in timetable.placement):
        return [f"placement {timetable.placement} names rows that do not exist"]
    counts: dict[tuple[str, int, int], int] = {}
    for index, row in enumerate(timetable.rows):
        for action in row:
            if not 0 <= action.stage < timetable.stages or action.micro not in timetable.micros_of(
                action.stage
            ):
                problems.append(f"row {index} has {action}, which does not exist")
            elif timetable.placement[action.stage] != index:
                problems.append(
                    f"row {index} has {action}, but row {timetable.placement[action.stage]} owns the stage"
                )
            if action.kind in COMPUTE:
                key = (action.kind, action.stage, action.micro)
                counts[key] = counts.get(key, 0) + 1
    for kind in ("F", "B", "W") if timetable.splits_backward else ("F", "B"):
        for stage in range(timetable.stages):
            for micro in timetable.micros_of(stage):
                times = counts.get((kind, stage, micro), 0)
                if times != 1:
                    problems.append(f"{kind}{stage}.{micro} happens {times} times")
    return problems


def _disordered(timetable: Timetable) -> list[str]:
    """Dependencies inside a row that the row's own order breaks."""
    problems = []
    split = timetable.splits_backward
    for index, row in enumerate(timetable.rows):
        at = {(a.kind, a.stage, a.micro): i for i, a in enumerate(row)}
        for i, action in enumerate(row):
            if action.kind == "U":
                late = [m for m in range(action.micro + 1) if at.get(("B", action.stage, m), -1) > i]
                problems += [f"row {index} has {action} before B{action.stage}.{m}" for m in late]
            for kind, stage in needs(action, timetable.length, split):
                if at.get((kind, stage, action.micro), -1) > i:
                    problems.append(f"row {index} has {action} before {kind}{stage}.{action.micro}")
    return problems


def _stuck(timetable: Timetable) -> list[tuple[int, Action]]:
    """(row, action) of every lowered row that cannot end: sends are buffered, a receive waits for its wire's head."""
    at = [0] * len(timetable.rows)
    wires: dict[tuple[int, int], deque[Action]] = {}

    def moved(row: int, actions: Sequence[Action]) -> bool:
        """Whether the row came further."""
        begin = at[row]
        for action in actions[begin:]:
            if action.kind in SENDS:
                wires.setdefault((row, action.peer), deque()).append(arrives_as(action, row))
            elif action.kind in RECEIVES:
                wire = wires.get((action.peer, row))
                if not wire or wire[0] != action:
                    break
                wire.popleft()
            at[row] += 1
        return at[row] > begin

    while any(moved(row, actions) for row, actions in enumerate(timetable.rows)):
        pass
    return [(i, row[at[i]]) for i, row in enumerate(timetable.rows) if at[i] < len(row)]
