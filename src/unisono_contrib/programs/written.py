"""A timetable as a user writes it: a function of stages and micro-batches that gives rows of actions, or text.

The text is that of the pictures that `draw` makes: `F2` is the forward of micro-batch 2, `B2/3` its backward in stage 3
where a rank owns several; dots, dashes and the names of ranks are passed over, so a picture may be taken as it is.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from inspect import getdoc
from typing import Any, ClassVar, cast

from unisono.programs.check import check
from unisono.programs.pipeline import Action, Kind, Timetable, bubble, peak_held, play_costs
from unisono.programs.schedules import Schedule
from unisono.spec.errors import UsageError
from unisono.spec.frames import of_user

Rows = str | Sequence[str | Sequence[str | Action]]
Function = Callable[[int, int], Rows]  # (ranks of the pipeline, micro-batches) -> one row for each rank

_ACTION = re.compile(r"([FBW])(\d+)(?:/(\d+))?")
_PASSED_OVER = re.compile(r"rank \d+|[.\-\s]+")


class WrittenSchedule(Schedule):
    """The schedule that a function makes. Each stage's gradients must be summed in ascending order of micro-batches,
    as all of ours are."""

    function: ClassVar[Function]
    played: ClassVar[bool] = True

    def timetable(self, ranks: int, micros: int) -> Timetable:
        """Raises UsageError where a computation lacks, is there twice or waits for ever; of_user's error where the
        function raises."""
        where = f"schedule={self.name} pp={ranks} micros={micros}"
        try:
            rows_of_user = type(self).function(ranks, micros)
        except UsageError:
            raise
        except Exception as error:
            raise of_user(error, "the timetable's function", where) from error
        try:
            rows = read(rows_of_user)
            if len(rows) != ranks:
                raise ValueError(f"it gives {len(rows)} rows for {ranks} ranks")
            table = Timetable(rows, _placement(rows), micros)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{self.name}: {error}", where=where, fix="a row of actions a rank", code="P13"
            ) from None
        wrong = check(table) or unordered(table)
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            fix = "each F and B once a stage and micro-batch, in an order that ends; docs/pipeline.md"
            raise UsageError(f"{self.name}: {wrong[0]}{more}", where=where, fix=fix, code="P13")
        return table

    def placement(self, ranks: int) -> tuple[int, ...]:
        return _example(type(self), ranks).placement

    def serves(self, ranks: int, micros: int) -> bool:
        try:
            self.timetable(ranks, micros)
        except UsageError:
            return False
        return True

    def held(self, row: int, ranks: int, micros: float) -> float:
        table = self.timetable(ranks, int(micros))
        return peak_held(table)[row] / len(table.owned(row))

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        """As played, each stage of a row taking its part of the row's time."""
        table = self.timetable(ranks, int(micros))
        each = table.stages // ranks
        late = weight / each if table.splits_backward else 0.0
        placed = play_costs(table, forward / each, backward / each - late, weight=late)
        return bubble(placed, ranks) * max(p.stop for p in placed)


@cache
def of_function(function: Function, name: str) -> type[WrittenSchedule]:
    """The member that a function of a user's file is. Its halves and pictures are read off its timetable."""
    halves = any(a.kind == "W" for row in _probe(function, name, 2).rows for a in row)
    about: dict[str, Any] = {
        "__doc__": getdoc(function) or f"The timetable that {name} gives.",
        "__module__": function.__module__,
        "__annotations__": {"name": ClassVar[str], "halves": ClassVar[bool], "function": ClassVar[Function]},
        "name": name, "halves": halves, "function": staticmethod(function),
    }  # fmt: skip
    return type(name, (WrittenSchedule,), about)


def read(table: Rows) -> tuple[tuple[Action, ...], ...]:
    """Rows as actions. An action without a stage is of the stage that has its row's number. Raises ValueError."""
    lines = [line for line in table.splitlines() if line.strip()] if isinstance(table, str) else table
    return tuple(tuple(_row(line, i)) for i, line in enumerate(lines))


def unordered(timetable: Timetable) -> list[str]:
    """Stages whose weights' gradients are not summed in ascending order of micro-batches, in words."""
    wrong = []
    for kind in ("B", "W") if timetable.splits_backward else ("B",):
        for row in timetable.rows:
            last: dict[int, int] = {}
            for action in (a for a in row if a.kind == kind):
                if action.micro < last.get(action.stage, -1):
                    wrong.append(f"{action} comes after that of micro-batch {last[action.stage]}")
                last[action.stage] = action.micro
    return wrong


def _row(line: str | Sequence[str | Action], row: int) -> list[Action]:
    if isinstance(line, str):
        line = _PASSED_OVER.sub(" ", line).split()
    return [word if isinstance(word, Action) else _action(word, row) for word in line]


def _action(word: str, row: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ValueError(f"row {row} has {word!r}, which is none of F0, B0, W0 or, with a stage, F0/2")
    kind, micro, stage = match.groups()
    return Action(cast(Kind, kind), row if stage is None else int(stage), int(micro))


def _placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    owners = {action.stage: index for index, row in enumerate(rows) for action in row}
    if missing := set(range(1 + max(owners, default=0))) - owners.keys():
        raise ValueError(f"nobody computes stage {min(missing)}")
    return tuple(owners[stage] for stage in range(len(owners)))


@cache
def _example(member: type[WrittenSchedule], ranks: int) -> Timetable:
    """A timetable for a number of micro-batches that the function takes: where its stages lie is told by any."""
    error: UsageError | None = None
    for micros in dict.fromkeys((2 * ranks, 4 * ranks, ranks, 8 * ranks, 1)):
        try:
            return member(cut="").timetable(ranks, micros)
        except UsageError as refused:
            error = error or refused
    raise error or AssertionError


def _probe(function: Function, name: str, ranks: int) -> Timetable:
    probe = type(name, (WrittenSchedule,), {"__module__": __name__, "__annotations__": {"name": ClassVar[str]},
                                    "name": name, "function": staticmethod(function)})  # fmt: skip
    try:
        return _example(probe, ranks)
    except UsageError:  # said where it is asked for
        return Timetable(((),), (), 0)
