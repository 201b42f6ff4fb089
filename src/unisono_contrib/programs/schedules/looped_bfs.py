"""Breadth-first pipeline: all micro-batches through a stage before the row's next stage (Lamy-Poirier, 2023)."""

from unisono.programs.pipeline import Action, Timetable
from unisono.programs.schedules import Looped
from unisono.spec.numbers import larger


class LoopedBfs(Looped):
    """Bubble (ranks-1)(F+B)/v from micros >= ranks on, all activations held (micros, as GPipe); any number is served.

    Its use is with sharded parameters: a stage's weights are gathered, and its gradients reduced, once a pass instead
    of once a group. With fewer micro-batches than ranks a loop is shorter than the way round, and rows wait at each
    turn. Backwards run in the order of the forwards, as ours of GPipe do: each stage's in ascending micro-batches.
    """

    name = "looped_bfs"
    played = True
    heaped = True

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        # A loop is at least as long as the way round.
        turns = (ranks - 1) + (self.v - 1) * larger(0, ranks - micros)
        return turns * (forward + backward) / self.v

    def timetable(self, ranks: int, micros: int) -> Timetable:
        rows = tuple(
            tuple(Action("F", turn * ranks + row, micro) for turn in range(self.v) for micro in range(micros))
            + tuple(
                Action("B", turn * ranks + row, micro)
                for turn in reversed(range(self.v))
                for micro in range(micros)
            )
            for row in range(ranks)
        )
        return Timetable(rows, self.placement(ranks), micros)
