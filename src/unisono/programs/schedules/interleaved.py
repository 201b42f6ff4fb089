"""Interleaved 1F1B: every rank owns v smaller stages, so the pipeline fills v times sooner (Narayanan et al., 2021)."""

from unisono.programs.pipeline import Action, Timetable
from unisono.programs.schedules import Looped
from unisono.spec.errors import UsageError


class Interleaved(Looped):
    """Bubble (ranks-1)(F+B)/v, F and B of a whole rank's share; stage s on row s mod ranks, in Megatron's order.

    Row 0 holds at most ranks(1 + (ranks-1)/(ranks v)) whole shares of activations: (v+1)ranks - 1 stages' worth.
    Messages are v times as many. Micro-batches go through in groups of `ranks`, so another number than a multiple of it
    is refused. Backwards of each stage run in ascending order of micro-batches.
    """

    name = "interleaved"
    played = True

    def serves(self, ranks: int, micros: int) -> bool:
        return micros % ranks == 0

    def held(self, row: int, ranks: int, micros: float) -> float:
        # Warm-up of 2 (ranks-row-1) + (v-1) ranks stages and the one being computed, each 1/v of a row.
        return (2 * (ranks - row - 1) + (self.v - 1) * ranks + 1) / self.v

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        return (ranks - 1) * (forward + backward) / self.v

    def timetable(self, ranks: int, micros: int) -> Timetable:
        if not self.serves(ranks, micros):
            fewer, more = micros // ranks * ranks, (micros // ranks + 1) * ranks
            raise UsageError(
                f"interleaved serves micro-batches in groups of {ranks}, and {micros} is no multiple of it",
                where=f"schedule=interleaved pp={ranks} micros={micros}",
                fix=" or ".join(f"micros={n}" for n in (fewer, more) if n) + ", or schedule=looped_bfs",
            )
        rows = tuple(_row(row, ranks, micros, self.v) for row in range(ranks))
        return Timetable(rows, self.placement(ranks), micros)


def _row(row: int, ranks: int, micros: int, v: int) -> tuple[Action, ...]:
    total = micros * v

    def action(kind: str, k: int) -> Action:
        """The k-th forward or backward of the row: a group through one stage, then through the next of the row."""
        group, inside = divmod(k, ranks * v)
        turn, micro = divmod(inside, ranks)
        if kind == "F":
            return Action("F", turn * ranks + row, group * ranks + micro)
        return Action("B", (v - 1 - turn) * ranks + row, group * ranks + micro)

    ahead = min(total, 2 * (ranks - 1 - row) + (v - 1) * ranks)
    actions = [action("F", k) for k in range(ahead)]
    for k in range(total):
        if k + ahead < total:
            actions.append(action("F", k + ahead))
        actions.append(action("B", k))
    return tuple(actions)
