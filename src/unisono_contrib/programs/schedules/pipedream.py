"""PipeDream: 1F1B without a flush, each stage updates when it has its gradient (Narayanan et al., 2019, 2021)."""

from pydantic import Field

from unisono.programs.pipeline import Action, Timetable
from unisono.programs.schedules import Unflushed
from unisono.programs.schedules.one_f_one_b import OneFOneB
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity


class PipeDream(Unflushed):
    """No bubble; a backward uses its forward's weights, of which each stage stashes the versions in flight.

    Stage s of p updates directly after the last of its m backwards of a step, while p-1-s forwards of the next step are
    done: those have used older weights. Micro-batch k, counted since the pipeline was last empty, uses the weights
    after floor((k - (p-1-s)) / m) updates since then, or those of then where that is negative.

    buffers=2 is PipeDream-2BW (Narayanan et al., 2021): all stages use the weights from before the last update, so
    w(t+1) = w(t) - lr g(w(t-1)), and two versions are enough. It needs as many micro-batches as ranks.
    """

    name = "pipedream"
    played = True
    fidelity = Fidelity.LOSSY

    buffers: int = Field(
        0,
        ge=0,
        le=2,
        multiple_of=2,
        description="2: two versions of the weights; 0: as many as are in flight",
    )

    def serves(self, ranks: int, micros: int) -> bool:
        return not self.buffers or micros >= ranks

    def timetable(self, ranks: int, micros: int) -> Timetable:
        """Of one step that begins and ends with an empty pipeline: that of 1f1b."""
        if not self.serves(ranks, micros):
            raise UsageError(
                f"two versions of the weights need as many micro-batches as ranks, not {micros} on {ranks}",
                where=f"schedule=pipedream:buffers=2 pp={ranks} micros={micros}",
                fix=f"micros={ranks}, or schedule=pipedream",
                code="P13",
            )
        return OneFOneB(cut=self.cut).timetable(ranks, micros)

    def stretch(
        self, row: int, ranks: int, micros: int, done: tuple[int, int], backwards: int, known: int
    ) -> tuple[Action, ...]:
        forwards, actions = done[0], []
        for micro in range(done[1], backwards):
            while forwards < min(micro + ranks - row, known):
                actions.append(Action("F", row, forwards))
                forwards += 1
            actions.append(Action("B", row, micro))
            if (micro + 1) % micros == 0:
                actions.append(Action("U", row, micro))
        return tuple(actions)

    def begun(self, row: int, ranks: int, backwards: int, known: int) -> int:
        return min(backwards + ranks - 1 - row, known) if backwards else 0

    def ahead(self, ranks: int) -> int:
        # ranks - 1 are through before the step is told of, so that nobody waits for the numbers of all stages, and as
        # many more are in flight.
        return 2 * (ranks - 1)

    def version(self, stage: int, ranks: int, micros: int, micro: int) -> int:
        if self.buffers:
            return max(0, micro // micros - 1)
        return max(0, (micro - (ranks - 1 - stage)) // micros)

    def stale(self, row: int, ranks: int, micros: int) -> int:
        return 1 if self.buffers else -(-(ranks - 1 - row) // micros)

    def loses(self, ranks: int, micros: int) -> str:
        kept = f"{self.name} is LOSSY: a backward uses its forward's weights, and these lack"
        if self.buffers:
            return f"{kept} the last update in every stage: w(t+1) = w(t) - lr g(w(t-1))"
        return (
            f"{kept} up to {self.stale(0, ranks, micros)} updates: micro-batch k in stage s of {ranks} uses those after"
            f" floor((k - ({ranks - 1} - s)) / {micros}) updates, k counted since the pipeline was last empty"
        )

    def crosses(self, row: int, ranks: int) -> bool:
        return row < ranks - 1

    def stashed(self, row: int, ranks: int, micros: int) -> float:
        if self.buffers:
            return 2.0
        return 1.0 + self.stale(row, ranks, micros) if self.crosses(row, ranks) else 0.0

    def held(self, row: int, ranks: int, micros: float) -> float:
        return float(ranks - row)

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        return 0.0 * micros
