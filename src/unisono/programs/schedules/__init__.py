"""Pipeline schedules, one a file: each says in which order every rank computes its stages' micro-batches."""

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import Field

from unisono.programs.pipeline import Timetable
from unisono.programs.pricing import Costs
from unisono.spec.family import Family, Member
from unisono.spec.fidelity import Fidelity


class Schedule(Member, ABC):
    """A timetable for any number of ranks and micro-batches.

    fidelity: EXACT where a stage's gradient is summed in the order of its micro-batches. played: whether a run can play
    it; the others are drawn and priced. alone: it makes sense for one stage alone.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    played: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    cut: str = Field(
        "", pattern=r"^([1-9]\d*(/[1-9]\d*)*)?$", description="blocks of each stage: 13/12/12/11"
    )

    @abstractmethod
    def timetable(self, ranks: int, micros: int) -> Timetable:
        """One row of actions for each of `ranks`. Raises UsageError, with numbers that it serves, where it has none for
        these."""

    def fitted(self, ranks: int, micros: int, costs: Costs, kept: float = 1.0) -> Timetable:
        """The timetable for these costs, where the order depends on them. kept: the part of a micro-batch's activations
        that its W still needs after its B."""
        return self.timetable(ranks, micros)

    @property
    def later(self) -> bool:
        """Whether this version refuses to play it so."""
        return not self.played

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each stage as `cut` says them; () where they are for us to choose."""
        return tuple(map(int, self.cut.split("/"))) if self.cut else ()


class Looped(Schedule):
    """A schedule with several stages a rank, dealt in turn: stage s on row s mod ranks."""

    v: int = Field(2, ge=1, description="stages of each rank")

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The row of each stage."""
        return tuple(stage % ranks for stage in range(ranks * self.v))


SCHEDULES: Family[Schedule] = Family(
    "schedule", "unisono.programs.schedules", Schedule, "plan.schedule", ("P04", "P05")
)
