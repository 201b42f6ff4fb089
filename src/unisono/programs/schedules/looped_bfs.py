"""Breadth-first pipeline: all micro-batches through a stage before the row's next stage (Lamy-Poirier, 2023)."""

from unisono.programs.pipeline import Action, Timetable
from unisono.spec.errors import UsageError


def timetable(ranks: int, micros: int, v: int = 2) -> Timetable:
    """Bubble (ranks-1)(F+B)/v from micros >= ranks on, all activations held (micros, as GPipe); any number is served.

    Its use is with sharded parameters: a stage's weights are gathered, and its gradients reduced, once a pass instead
    of once a group. With fewer micro-batches than ranks a loop is shorter than the way round, and rows wait at each
    turn. Backwards run in the order of the forwards, as ours of GPipe do: each stage's in ascending micro-batches.
    """
    placement = looped(ranks, v)
    rows = tuple(
        tuple(Action("F", turn * ranks + row, micro) for turn in range(v) for micro in range(micros))
        + tuple(
            Action("B", turn * ranks + row, micro) for turn in reversed(range(v)) for micro in range(micros)
        )
        for row in range(ranks)
    )
    return Timetable(rows, placement, micros)


def looped(ranks: int, v: int) -> tuple[int, ...]:
    """v stages a row, dealt in turn: stage s on row s mod ranks."""
    if v < 1:
        raise UsageError(f"v={v} stages a rank: it is at least 1", fix="v=2")
    return tuple(stage % ranks for stage in range(ranks * v))
