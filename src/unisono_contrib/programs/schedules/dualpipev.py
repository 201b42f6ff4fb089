"""DualPipeV: DualPipe folded in its middle, so no parameters are there twice (DeepSeek-AI and Sea AI Lab, 2025)."""

from unisono.programs.pipeline import Timetable
from unisono.programs.schedules import VShaped
from unisono.spec.errors import UsageError
from unisono_contrib.programs.two_ways import row
from unisono_contrib.programs.zero_bubble import spare


class DualPipeV(VShaped):
    """Bubble (ranks-1)(FB + B - 3W) in times of a stage, B with W in it: DualPipe's of 2 ranks stages.

    Exact where F, B towards the input and W cost the same and an overlapped pair FB (`play_costs`'s `together`) their
    sum. Rank r owns stages r and 2 ranks - 1 - r, as in ZB-V, and holds at most 2 ranks + 1 stages' worth of
    activations. micros must be at least 2 ranks; fewer are refused. Each stage's gradients are in ascending order.
    """

    name = "dualpipev"
    played = True
    overlapped = True

    def serves(self, ranks: int, micros: int) -> bool:
        return micros >= 2 * ranks

    def held(self, row: int, ranks: int, micros: float) -> float:
        return ranks + 0.5

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        pair = forward + backward
        return (ranks - 1) / 2 * (pair + backward - 3 * spare(forward, backward, weight))

    def timetable(self, ranks: int, micros: int) -> Timetable:
        if not self.serves(ranks, micros):
            raise UsageError(
                f"dualpipev needs at least 2 pp = {2 * ranks} micro-batches, not {micros}",
                where=f"schedule=dualpipev pp={ranks} micros={micros}",
                fix=f"micros={2 * ranks}, or schedule=zbv",
            )
        rows = [row(r, ranks, (r, range(micros)), (2 * ranks - 1 - r, range(micros))) for r in range(ranks)]
        return Timetable(
            tuple(tuple(actions) for actions, _ in rows),
            self.placement(ranks),
            micros,
            overlapped=frozenset(pair for _, pairs in rows for pair in pairs),
        )
