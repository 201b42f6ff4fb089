"""DualPipe: micro-batches enter at both ends, F of one runs with B of another (DeepSeek-AI, 2024, 2412.19437)."""

from unisono.programs.pipeline import Timetable
from unisono.programs.schedules import VShaped
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity
from unisono_contrib.programs.two_ways import row
from unisono_contrib.programs.zero_bubble import spare


class DualPipe(VShaped):
    """Bubble (ranks/2-1)(FB + B - 3W), B with W in it, FB the time of an overlapped pair (`play_costs`'s `together`).

    That is exact where F, B towards the input and W cost the same and FB their sum. Two copies of the parameters:
    stages 0 to ranks-1 are the model from row 0 down, ranks to 2 ranks - 1 the model again from the last row up. At
    most ranks + 1 micro-batches are held. The first half of the micro-batches takes the first copy, the second half the
    second, so `ranks` and `micros` must be even, and micros at least 2 ranks; others are refused.

    Each copy's gradients are in ascending order, but a stage's gradient is the sum of its two copies' sums: it is not
    bit-identical to the other schedules', only equal up to rounding.
    """

    name = "dualpipe"
    played = True
    fidelity = Fidelity.ROUNDING
    chains = 2
    overlapped = True

    def serves(self, ranks: int, micros: int) -> bool:
        return ranks % 2 == 0 and micros % 2 == 0 and micros >= 2 * ranks

    def held(self, row: int, ranks: int, micros: float) -> float:
        return ranks + 1.0

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        pair = forward + backward
        return (ranks / 2 - 1) * (pair + backward - 3 * spare(forward, backward, weight))

    def timetable(self, ranks: int, micros: int) -> Timetable:
        if not self.serves(ranks, micros):
            even = ranks + ranks % 2
            raise UsageError(
                f"dualpipe needs an even number of stages and an even number of at least 2 pp micro-batches, "
                f"not {ranks} and {micros}",
                where=f"schedule=dualpipe pp={ranks} micros={micros}",
                fix=f"pp={even} micros={max(2 * even, micros + micros % 2)}, or schedule=zb1p",
            )
        half, share = ranks // 2, micros // 2
        rows, overlapped = [], []
        for rank in range(ranks):
            down, up = (rank, range(share)), (2 * ranks - 1 - rank, range(share, micros))
            near, far = (down, up) if rank < half else (up, down)
            actions, pairs = row(min(rank, ranks - 1 - rank), half, near, far)
            rows.append(tuple(actions))
            overlapped += pairs
        return Timetable(
            tuple(rows), self.placement(ranks), micros, chains=2, overlapped=frozenset(overlapped)
        )
