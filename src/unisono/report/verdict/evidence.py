"""The figures that a verdict rests on: seconds of a step, of each rank, in each step of a stretch of a run."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from unisono.observe.span import PARTS
from unisono.report.stragglers import Straggler
from unisono.spec.words import is_number, whole

STACKED = tuple(part for part in PARTS if part != "comm_hidden")  # these add up to a step's wall time
T = TypeVar("T")
BESIDE = ("cpu_s", "queue_s", "gc_s", "save_s", "eval_s", "faults", "system_s")
"""Numbers of a step's line beside its parts: seconds in which the thread that trains had a core (`cpu_s`), or was ready
and had none (`queue_s`), of garbage collection, of saving and of validating since the step before, pages that had
to be read from a disk (`faults`), and what the system worked for the thread (`system_s`, a part of `cpu_s`)."""
BUSY = ("data", "forward", "backward", "optim", "other", "between")
IDLE = ("wait", "comm_exposed")
Prices = Callable[[str], float | None]
"""The planner's price of a change, as typed: seconds of a step of as many samples over those of today's plan; None
where it has none."""


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One step on one rank. parts: seconds, by `observe.span.PARTS`, and `between`: what followed the step before, but
    for its save and its validation. beside: what else its line says in numbers, see `BESIDE`. start: Unix seconds, None
    where nobody wrote it. modules: own seconds."""

    step: int
    parts: Mapping[str, float]
    beside: Mapping[str, float] = field(default_factory=dict)
    start: float | None = None
    modules: Mapping[str, float] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        return sum(self.parts.get(part, 0.0) for part in STACKED)

    @property
    def busy(self) -> float:
        return sum(self.parts.get(part, 0.0) for part in BUSY)

    @property
    def idle(self) -> float:
        return sum(self.parts.get(part, 0.0) for part in IDLE)

    @property
    def blocked(self) -> float:
        """Seconds in which its thread had no core and wanted none, beside those that it waited for ranks and samples:
        it waited for a disk. 0 where nobody counted them."""
        if "cpu_s" not in self.beside:
            return 0.0
        known = (
            self.beside["cpu_s"] + self.beside.get("queue_s", 0.0) + self.idle + self.parts.get("data", 0.0)
        )
        return max(0.0, self.wall - known)

    @property
    def paging(self) -> float:
        """Seconds for pages that were read from a disk: the wait for it, and the system's work; 0 without any."""
        return self.blocked + self.beside.get("system_s", 0.0) if self.beside.get("faults", 0.0) >= 1 else 0.0

    @property
    def cored(self) -> float:
        """Of the time in which its thread wanted a core, the share in which it had one."""
        cpu, queue = self.beside.get("cpu_s", 0.0), self.beside.get("queue_s", 0.0)
        return cpu / (cpu + queue) if cpu + queue > 0 else 1.0


@dataclass(frozen=True, slots=True)
class RankSeen:
    """The steps of one rank, ascending, and its place in the mesh."""

    rank: int
    steps: tuple[StepSeen, ...]
    coords: Mapping[str, int] = field(default_factory=dict)
    host: str = ""

    @property
    def name(self) -> str:
        place = " ".join(f"{axis}={at}" for axis, at in self.coords.items())
        return f"rank {self.rank}" + (f" ({place})" if place else "")


@dataclass(frozen=True, slots=True)
class CallsSeen:
    """Collectives of one axis and operation in a mean step of a mean rank. moving: seconds from the last rank's arrival
    until all was there, of all calls together, as far as nothing hid them."""

    axis: str
    op: str
    count: float
    nbytes: float
    moving: float


@dataclass(frozen=True, slots=True)
class KernelsSeen:
    """One step that a rank looked at, operation by operation. count: operations called from Python or backward.
    inside: seconds inside of them. python: seconds of forward and backward outside of any. small: seconds of those
    operations that took less than 60 µs, and how many they were. gap: between which two most time was spent, or ""."""

    count: int
    inside: float
    python: float
    small: float
    small_count: int
    gap: str = ""


@dataclass(frozen=True, slots=True)
class BubbleSeen:
    """Shares of a pipeline's time in which its ranks idle. measured: as it ran. planned: its timetable with the
    measured costs of stages. ideal: with equal ones. stages: seconds of each stage's micro-batch, there and back.
    better: of twice as many micro-batches, with equal stages."""

    measured: float
    planned: float
    ideal: float
    stages: tuple[float, ...]
    better: float


@dataclass(frozen=True)
class RunEvidence:
    """All that a verdict looks at; means are worked out once, since every cause asks for them.

    ranks: with the same steps. whole: whether every rank's file was there. plan: its words. recipe: sections as
    resolved. cores: of the one host, 0 for several hosts or where nobody knows. memory_mib: of the host. peak_mib: of
    each rank. spread: axis -> share of exposed communication, by traced steps.
    """

    ranks: tuple[RankSeen, ...]
    plan: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    cores: int = 0
    memory_mib: float = 0.0
    peak_mib: float = 0.0
    whole: bool = True
    calls: tuple[CallsSeen, ...] = ()
    kernels: tuple[KernelsSeen, ...] = ()
    late: tuple[Straggler, ...] = ()
    bubble: BubbleSeen | None = None
    spread: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    _means: dict[tuple[str, str], float] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The steps that were seen."""
        return tuple(step.step for step in self.ranks[0].steps) if self.ranks else ()

    @cached_property
    def rows(self) -> list[tuple[StepSeen, ...]]:
        """For each step what all ranks saw of it."""
        return list(zip(*(rank.steps for rank in self.ranks), strict=True))

    @cached_property
    def wall(self) -> float:
        """Seconds of a mean step, of the mean rank, without what lies between two steps."""
        return self.mean(lambda step: step.wall)

    @cached_property
    def period(self) -> float:
        """Seconds from the end of one step to the end of the next."""
        return self.wall + self.part("between") + self.beside("save_s") + self.beside("eval_s")

    def mean(self, number: Callable[[StepSeen], float]) -> float:
        """The mean over ranks and steps."""
        values = [number(step) for rank in self.ranks for step in rank.steps]
        return statistics.fmean(values) if values else 0.0

    def part(self, name: str) -> float:
        """Seconds of a mean step in a part of `PARTS`."""
        return self._mean_of("parts", name)

    def beside(self, name: str) -> float:
        """The mean of a number that steps' lines have beside their parts; 0 where none has it."""
        return self._mean_of("beside", name)

    def _mean_of(self, kind: str, name: str) -> float:
        if (kind, name) not in self._means:
            self._means[kind, name] = self.mean(lambda step: getattr(step, kind).get(name, 0.0))
        return self._means[kind, name]

    def has(self, name: str) -> bool:
        """Whether any step's line has this number."""
        return any(name in step.beside for rank in self.ranks for step in rank.steps)

    def size(self, key: str) -> int:
        """A number of the plan, 1 where it is not named."""
        return whole(self.plan.get(key, "1")) or 1

    def setting(self, section: str, key: str) -> Any:
        """A value of the recipe; None where it is not set."""
        values = self.recipe.get(section)
        return values.get(key) if isinstance(values, dict) else None


def steady(steps: Sequence[T]) -> Sequence[T]:
    """The steps without the first tenth (at least one, at most ten): they pay for warming up."""
    return steps[min(10, max(1, len(steps) // 10)) :] if len(steps) > 2 else steps


def number_of(line: Mapping[str, Any], key: str) -> float:
    """A number of a line that a run wrote; 0 where it is absent, or none."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and is_number(value) else 0.0
