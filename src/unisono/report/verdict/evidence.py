"""The figures that a verdict rests on: seconds of a step, of each rank, in each step of a stretch of a run."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from unisono.observe.span import PARTS
from unisono.report.collect import RankFacts, Record, RunRecord
from unisono.spec.words import is_number, whole

STACKED = tuple(part for part in PARTS if part != "comm_hidden")  # these add up to a step's wall time
T = TypeVar("T")
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
    operations that took less than 25 µs, and how many they were. gap: between which two most time was spent, or ""."""

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


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """All that a verdict looks at. ranks: with the same steps. whole: whether every rank's file was there.
    plan: its words. recipe: sections as resolved. cores: of the one host, 0 for several hosts or where nobody knows.
    memory_mib: of the host. peak_mib: of each rank. spread: axis -> share of exposed communication, by traced steps.
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
    bubble: BubbleSeen | None = None
    spread: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The steps that were seen."""
        return tuple(step.step for step in self.ranks[0].steps) if self.ranks else ()

    @property
    def rows(self) -> list[tuple[StepSeen, ...]]:
        """For each step what all ranks saw of it."""
        return list(zip(*(rank.steps for rank in self.ranks), strict=True))

    @property
    def wall(self) -> float:
        """Seconds of a mean step, of the mean rank, without what lies between two steps."""
        return self.mean(lambda step: step.wall)

    @property
    def period(self) -> float:
        """Seconds from the end of one step to the end of the next."""
        return self.wall + self.part("between") + self.beside("save_s") + self.beside("eval_s")

    def mean(self, number: Callable[[StepSeen], float]) -> float:
        """The mean over ranks and steps."""
        values = [number(step) for rank in self.ranks for step in rank.steps]
        return statistics.fmean(values) if values else 0.0

    def part(self, name: str) -> float:
        """Seconds of a mean step in a part of `PARTS`."""
        return self.mean(lambda step: step.parts.get(name, 0.0))

    def beside(self, name: str) -> float:
        """The mean of a number that steps' lines have beside their parts; 0 where none has it."""
        return self.mean(lambda step: step.beside.get(name, 0.0))

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


def gather(run: RunRecord, window: tuple[int, int] | None = None) -> RunEvidence:
    """What a run's record says of its steady steps, or of those from window[0] to window[1]."""
    from unisono.report.verdict import traced  # reads spans, of which most figures need none

    seen = run.ranks or (RankFacts(0, steps=tuple(r for r in run.steps if isinstance(r.get("time"), dict))),)
    common = set.intersection(*({line["step"] for line in facts.steps} for facts in seen))
    wanted = (
        steady(sorted(common))
        if window is None
        else [s for s in sorted(common) if window[0] <= s <= window[1]]
    )
    kept = frozenset(wanted)
    ranks = tuple(
        RankSeen(
            facts.rank,
            tuple(_seen(line) for line in facts.steps if line["step"] in kept),
            facts.coords,
            facts.host,
        )
        for facts in seen
    )
    environment = run.environment
    several = len({rank.host for rank in ranks}) > 1
    cores = environment.get("cores_usable") or environment.get("cores")
    world = run.summary.get("ranks")
    memory = environment.get("memory_gib")
    return RunEvidence(
        ranks,
        plan={key: value for key, _, value in (word.partition("=") for word in run.plan.split())},
        recipe=run.config,
        cores=cores if isinstance(cores, int) and not several else 0,
        memory_mib=1024.0 * memory if is_number(memory) else 0.0,
        peak_mib=max(
            (line["mem_mib"] for f in seen for line in f.steps if is_number(line.get("mem_mib"))), default=0.0
        ),
        whole=not isinstance(world, int) or world == len(seen),
        calls=traced.calls(run, kept),
        kernels=tuple(_kernels(line["kernels"]) for f in seen for line in f.steps if _looked(line)),
        bubble=traced.bubble(run),
        spread=traced.spread(run),
        error=str(run.error.get("what", "no reason was written down")) if run.error else "",
    )


def _seen(line: Record) -> StepSeen:
    time, start, modules = line["time"], line.get("start"), line.get("modules")
    own = {}
    for name, pair in modules.items() if isinstance(modules, dict) else ():
        if isinstance(pair, list) and all(is_number(value) for value in pair):
            own[str(name)] = float(sum(pair))
    return StepSeen(
        line["step"],
        {part: float(time[part]) for part in PARTS if is_number(time.get(part))} | _between(line),
        {key: float(line[key]) for key in BESIDE if is_number(line.get(key))},
        float(start) if is_number(start) else None,
        own,
    )


def _between(line: Record) -> dict[str, float]:
    spent, save, validation = (
        float(line[k]) if is_number(line.get(k)) else 0.0 for k in ("between_s", "save_s", "eval_s")
    )
    return {"between": max(0.0, spent - save - validation)}


BESIDE = ("cpu_s", "queue_s", "gc_s", "save_s", "eval_s", "faults")
"""Numbers of a step's line beside its parts: seconds in which the thread that trains had a core (`cpu_s`), or was ready
and had none (`queue_s`), of garbage collection, of saving and of validating since the step before, and pages that had
to be read from a disk (`faults`)."""
_KERNELS = ("count", "inside_s", "python_s", "small_s", "small_count")


def _looked(line: Record) -> bool:
    kernels = line.get("kernels")
    return isinstance(kernels, dict) and all(is_number(kernels.get(key)) for key in _KERNELS)


def _gap(gap: object) -> str:
    """Between which operations, without torch's own first names."""
    names = (
        [str(name).rpartition("::")[2].removeprefix("evaluate_function: ") for name in gap[:2]]
        if isinstance(gap, list)
        else []
    )
    return f"between {names[0]} and {names[1]}" if len(names) == 2 and names[0] else ""


def _kernels(line: Record) -> KernelsSeen:
    count, inside, python, small, small_count = (line[key] for key in _KERNELS)
    return KernelsSeen(int(count), inside, python, small, int(small_count), _gap(line.get("gap")))
