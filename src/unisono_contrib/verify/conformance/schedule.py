"""What every schedule owes: whole, ordered, free of deadlock, a pure function, and refusals that say what is served."""

from collections.abc import Iterator
from pathlib import Path

from unisono.programs.check import check
from unisono.programs.pipeline import Timetable, bubble, lower, play_costs
from unisono.programs.schedules import Schedule
from unisono.spec.errors import UsageError


def faults(schedule: Schedule, folder: Path, text: str) -> Iterator[str]:
    """1. It serves 2, 4 and 8 ranks with twice as many micro-batches. 2. Whatever it serves, up to 8 ranks and 16
    micro-batches, is whole and free of deadlock; what it does not, it refuses with numbers that it does. 3. Gradients
    of a stage are summed in ascending order of micro-batches, so that schedules agree to the bit. 4. It idles no more
    than one micro-batch at a time would. 5. It gives the same each time."""
    for ranks in (2, 4, 8):
        if _served(schedule, ranks, 2 * ranks) is None:
            yield f"it refuses {ranks} ranks and {2 * ranks} micro-batches, which every schedule serves"
    for ranks in range(1, 9):
        for micros in range(1, 17):
            table = _served(schedule, ranks, micros)
            if isinstance(table, str):
                yield f"{ranks} ranks, {micros} micro-batches: {table}"
            elif table is not None:
                for fault in _of_table(table, ranks, micros):
                    yield f"{ranks} ranks, {micros} micro-batches: {fault}"
    if _served(schedule, 4, 8) != _served(schedule, 4, 8):
        yield "asked twice for 4 ranks and 8 micro-batches, it gives two timetables"


def _served(schedule: Schedule, ranks: int, micros: int) -> Timetable | str | None:
    """The timetable; None where it is refused in words; what is wrong with the refusal."""
    try:
        return schedule.timetable(ranks, micros)
    except UsageError as refusal:
        return None if refusal.fix else "it is refused without saying what is served"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _of_table(table: Timetable, ranks: int, micros: int) -> Iterator[str]:
    if (len(table.rows), table.micros, table.stages % ranks) != (ranks, micros, 0):
        yield f"{len(table.rows)} rows, {table.micros} micro-batches, {table.stages} stages"
        return
    if wrong := check(table):
        yield wrong[0]
        return
    last = "W" if table.splits_backward else "B"
    for row in table.rows:
        for stage in {action.stage for action in row}:
            order = [action.micro for action in row if action.kind == last and action.stage == stage]
            if order != list(table.micros_of(stage)):
                yield f"gradients of stage {stage} are summed in the order {order}"
    idle = bubble(play_costs(table))
    if idle > (ranks - 1) / ranks + 1e-12:
        yield f"it idles {idle:.0%} of the time, one micro-batch at a time {(ranks - 1) / ranks:.0%}"
    if ranks == 1 and any(action.kind not in "FBW" for row in lower(table).rows for action in row):
        yield "one rank sends messages to itself"
