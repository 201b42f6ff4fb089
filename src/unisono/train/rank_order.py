"""What one rank is told of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from unisono.config import Recipe
from unisono.plan import Plan
from unisono.spec.rendezvous import Rendezvous
from unisono.train.build.build import Place
from unisono.train.recovery.fault_injection import FaultInjector
from unisono.train.recovery.replication import SnapshotReplicas
from unisono.train.recovery.snapshot_buffer import SnapshotBuffer
from unisono.train.watch.journal import Uplink


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What one rank is told. recipe and plan are resolved. resume: a checkpoint's folder, or None.

    token: shared by all ranks. epoch: how often they have met; both together are new at each start. rendezvous: that
    in which this rank, a new process, takes a lost one's place; None at a start. last_bits: what the last bits of a sum
    depend on beside the plan, by name; checkpoints keep it. until: the step after which this start ends; 0: the
    recipe's last.
    """

    recipe: Recipe
    plan: Plan
    run_dir: Path
    resume: Path | None
    place: Place
    store: Any  # a torch Store
    line: Uplink
    host: str
    token: str
    last_bits: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    rendezvous: Rendezvous | None = None
    buffer: SnapshotBuffer | None = None
    replicas: SnapshotReplicas | None = None
    faults: FaultInjector = field(
        default_factory=FaultInjector
    )  # what is done beside, where faults are played
    until: int = 0

    @property
    def last_step(self) -> int:
        """The step after which this start ends. Schedules go by the recipe's last step all the same."""
        return min(self.recipe.train.steps, self.until or self.recipe.train.steps)

    def at(self, rendezvous: Rendezvous) -> Self:
        """The order from a meeting on: number, world and plan may be others."""
        meeting, spread = rendezvous.meeting, rendezvous.meeting.spread
        host = meeting.rank - meeting.local_rank  # ranks of one host follow each other
        place = replace(self.place, rank=meeting.rank, world=meeting.world, host=host)
        if spread:
            place = replace(place, speeds=tuple(spread["speeds"]))
        plan = Plan.parse(spread["plan"]) if spread else self.plan
        return replace(self, place=place, plan=plan, store=rendezvous.store, epoch=meeting.epoch)
