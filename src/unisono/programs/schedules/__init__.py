"""Pipeline schedules, one a file: each says in which order every rank computes its stages' micro-batches."""

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import Field

from unisono.programs.pipeline import Action, Timetable
from unisono.spec.family import Family, Member
from unisono.spec.fidelity import Fidelity


class Schedule(Member, ABC):
    """A timetable for any number of ranks and micro-batches.

    fidelity: EXACT where a stage's gradient is summed in the order of its micro-batches. played: whether a run can play
    it; the others are drawn and priced. alone: it makes sense for one stage alone.

    For prices, all else is read off the placement. chains: copies of the model, each with its own micro-batches.
    halves: weight gradients are apart. heaped: all forward passes come before the first backward one. late: the last
    row's weight gradients wait, the head's among them; where they do not, the head's come directly after its backward.
    overlapped: one micro-batch computes while another's messages travel.
    flushed: a step ends with an empty pipeline; else it is an `Unflushed`.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    played: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    chains: ClassVar[int] = 1
    halves: ClassVar[bool] = False
    heaped: ClassVar[bool] = False
    late: ClassVar[bool] = False
    overlapped: ClassVar[bool] = False
    flushed: ClassVar[bool] = True

    cut: str = Field(
        "",
        pattern=r"^((0/)?[1-9]\d*(/[1-9]\d*)*(/0)?|measured)?$",
        description="blocks of each stage: 13/12/12/11, at the ends 0 too; measured: balanced by the blocks' seconds",
    )

    @abstractmethod
    def timetable(self, ranks: int, micros: int) -> Timetable:
        """One row of actions for each of `ranks`. Raises UsageError, with numbers that it serves, where it has none for
        these."""

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The row of each stage."""
        return tuple(range(ranks))

    def serves(self, ranks: int, micros: int) -> bool:
        """Whether there is a timetable for these."""
        return True

    def held(self, row: int, ranks: int, micros: float) -> float:
        """Micro-batches whose activations a row holds at its peak, each counted over all its layers: as
        `pipeline.peak_held`, or at most that. micros, and what is given back, may be arrays."""
        return micros * 1.0 if self.heaped else float(ranks - row)

    def stashed(self, row: int, ranks: int, micros: int) -> float:
        """Versions of a row's weights that are held beside the optimiser's own, at most."""
        return 0.0

    def idle(self, ranks: int, micros: float, forward: float, backward: float, weight: float) -> float:
        """Seconds of a step in which a row waits, given seconds of one micro-batch on one row. weight: the part of
        backward that nobody waits for. All may be arrays."""
        return (ranks - 1) * (forward + backward)

    @property
    def later(self) -> bool:
        """Whether this version refuses to play it so."""
        return not self.played

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each stage as `cut` says them; () where they are for us to choose."""
        return tuple(map(int, self.cut.split("/"))) if self.cut and not self.measured else ()

    @property
    def measured(self) -> bool:
        """Whether stages are balanced by measured seconds."""
        return self.cut == "measured"


class Unflushed(Schedule, ABC):
    """A schedule whose pipeline is not emptied between steps: its rows go on over the end of a step, with the update
    inside. Micro-batches are counted since the pipeline was last empty. `timetable` is that of a step alone."""

    flushed = False

    @abstractmethod
    def stretch(
        self, row: int, ranks: int, micros: int, done: tuple[int, int], backwards: int, known: int
    ) -> tuple[Action, ...]:
        """A part of a row. done: forwards and backwards before it. backwards: where it ends. known: micro-batches that
        may be begun."""

    @abstractmethod
    def begun(self, row: int, ranks: int, backwards: int, known: int) -> int:
        """Forwards that a row has done after so many backwards."""

    @abstractmethod
    def ahead(self, ranks: int) -> int:
        """Micro-batches of later steps that are known at a step's begin."""

    @abstractmethod
    def version(self, stage: int, ranks: int, micros: int, micro: int) -> int:
        """Updates since then that are in the weights that a micro-batch uses."""

    @abstractmethod
    def stale(self, row: int, ranks: int, micros: int) -> int:
        """The most updates that weights of this row lack when they are used."""

    @abstractmethod
    def loses(self, ranks: int, micros: int) -> str:
        """What it promises instead of one device's run, in words."""

    @abstractmethod
    def crosses(self, row: int, ranks: int) -> bool:
        """Whether an update may come between a forward of this row and its backward."""

    def flow(self, ranks: int, micros: int, steps: int) -> Timetable:
        """Of several steps, from an empty pipeline to an empty one."""
        total = micros * steps
        rows = tuple(self.stretch(row, ranks, micros, (0, 0), total, total) for row in range(ranks))
        return Timetable(rows, self.placement(ranks), total)


class VShaped(Schedule):
    """A schedule with two stages a rank, the second half of them on the way back."""

    halves = True

    def placement(self, ranks: int) -> tuple[int, ...]:
        return (*range(ranks), *reversed(range(ranks)))


class Looped(Schedule):
    """A schedule with several stages a rank, dealt in turn: stage s on row s mod ranks."""

    v: int = Field(2, ge=1, le=1024, description="stages of each rank")

    def placement(self, ranks: int) -> tuple[int, ...]:
        return tuple(stage % ranks for stage in range(ranks * self.v))


SCHEDULES: Family[Schedule] = Family(
    "schedule",
    "unisono.programs.schedules",
    Schedule,
    "plan.schedule",
    ("P04", "P05"),
    wrap=("unisono.programs.written", "of_function"),
)
