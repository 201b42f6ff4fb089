"""When a replica may read the weights, and which gradients make an update. No torch.

A *clock* of a replica is the step that it computes. A *version* of the weights is the number of updates that made them.
The staleness of a gradient is the number of updates between the weights that it was computed with and the update that
it is in; of one that came too late, the number of updates that it missed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clocks:
    """What a rule sees. version: updates made. workers: replicas that take part. read: the version that each read last.
    pushed: by step, whose gradients have arrived for an update to come, in order; True where they are numbers. final:
    the step that all replicas finish together, -1 while nobody knows."""

    version: int
    workers: set[int]
    read: dict[int, int] = field(default_factory=dict)
    pushed: dict[int, dict[int, bool]] = field(default_factory=dict)
    final: int = -1

    def all_pushed(self, step: int) -> bool:
        """Whether all replicas have pushed for `step`."""
        return self.workers <= self.pushed.get(step, {}).keys()


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a gradient that arrives. step: whose update it is for. late: it missed that one. staleness: see
    above."""

    step: int
    late: bool
    staleness: int


class Rule(ABC):
    """updates_per_step: updates that come of one step of all replicas, by which the learning rate is scheduled."""

    updates_per_step: int = 1

    @abstractmethod
    def may_read(self, clocks: Clocks, worker: int, step: int) -> bool:
        """Whether a replica may read now to compute `step`."""

    def begun(self, clocks: Clocks, worker: int, step: int) -> None:
        """A replica has read the weights to compute `step`."""
        return None

    @abstractmethod
    def fate(self, clocks: Clocks, worker: int, step: int) -> Fate:
        """Of a gradient that a replica computed for `step` and that has just arrived."""

    @abstractmethod
    def due(self, clocks: Clocks) -> Sequence[int] | None:
        """The replicas whose gradients make the next update, None while it has to wait."""

    def rate(self, staleness: int) -> float:
        """What the learning rate is multiplied by."""
        return 1.0


@dataclass(slots=True)
class Bounded(Rule):
    """Stale synchronous parallel (Ho et al. 2013): update c takes the gradients of clock c of all replicas; a replica
    waits while it is more than `bound` clocks ahead of the slowest. bound=0 is lock-step."""

    bound: int

    def may_read(self, clocks: Clocks, worker: int, step: int) -> bool:
        return step - clocks.version <= self.bound

    def fate(self, clocks: Clocks, worker: int, step: int) -> Fate:
        return Fate(step, False, step - clocks.read[worker])

    def due(self, clocks: Clocks) -> Sequence[int] | None:
        return sorted(clocks.pushed[clocks.version]) if clocks.all_pushed(clocks.version) else None


@dataclass(slots=True)
class Unbounded(Rule):
    """Asynchronous: each gradient is an update, as soon as it arrives (Dean et al. 2012). replicas: whose gradients are
    one step's. aware: learning rates are divided by the staleness, where that is above 1 (Zhang et al. 2016)."""

    replicas: int
    aware: bool = False

    def __post_init__(self) -> None:
        self.updates_per_step = self.replicas

    def may_read(self, clocks: Clocks, worker: int, step: int) -> bool:
        return True

    def fate(self, clocks: Clocks, worker: int, step: int) -> Fate:
        return Fate(clocks.version, False, clocks.version - clocks.read[worker])

    def due(self, clocks: Clocks) -> Sequence[int] | None:
        return list(clocks.pushed.get(clocks.version, ())) or None

    def rate(self, staleness: int) -> float:
        return 1.0 / max(staleness, 1) if self.aware else 1.0


@dataclass(slots=True)
class Quorum(Rule):
    """Backup workers (Chen et al. 2016): update t takes the first k gradients that were computed from version t; who
    comes later goes on with the newest version.

    patience: a replica that was late so often in a row is waited for in the next step that it begins, so that the data
    of slow replicas is not left out for ever.
    """

    k: int
    patience: int
    late: dict[int, int] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)

    def may_read(self, clocks: Clocks, worker: int, step: int) -> bool:
        return step <= clocks.version  # below: others went on while it fetched its data, and it will be late

    def begun(self, clocks: Clocks, worker: int, step: int) -> None:
        if self.patience and self.late.get(worker, 0) >= self.patience:
            self.awaited.add(worker)

    def fate(self, clocks: Clocks, worker: int, step: int) -> Fate:
        is_late = step < clocks.version
        self.late[worker] = self.late.get(worker, 0) + 1 if is_late else 0
        return Fate(step, is_late, clocks.version - step)

    def due(self, clocks: Clocks) -> Sequence[int] | None:
        pushed: Set[int] = clocks.pushed.get(clocks.version, {}).keys()
        if not clocks.all_pushed(clocks.version):
            numbers = sum(clocks.pushed.get(clocks.version, {}).values())
            awaited = self.awaited & clocks.workers
            if clocks.version == clocks.final or numbers < self.k or not awaited <= pushed:
                return None
        self.awaited.clear()
        return sorted(pushed)
