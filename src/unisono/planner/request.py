"""The request for a price: a model, a plan, a cluster, a batch."""

from dataclasses import dataclass
from typing import Protocol

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster
from unisono.planner.model_kinds import Model
from unisono.planner.stack import Stack
from unisono.planner.timetables import serves
from unisono.spec.work import Durations


class StepTimes(Protocol):
    """How unevenly ranks work: a distribution of the seconds of their steps around a mean of 1."""

    @property
    def name(self) -> str: ...

    def slowest(self, n: int) -> float:
        """Mean of the longest of `n` ranks."""
        ...

    def durations(self, replicas: int, ranks: int, steps: int) -> Durations:
        """[replicas][steps], drawn alike each time: how long a step takes each replica, whose `ranks` ranks wait for
        the slowest of them."""
        ...


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan to be priced: `micros` micro-batches of `micro_batch` samples on each data rank, for `steps` steps.

    stragglers: how unevenly ranks work, None where all are as quick as they are priced. assumed: choices that nobody
    named and the planner took, in words. unplayed: what of the recipe `train` cannot play, in words. by_sample: whether
    a step computes gradients of single samples.
    """

    model: Model
    plan: Plan
    cluster: Cluster
    stack: Stack
    micro_batch: int
    micros: int
    steps: int = 0
    stragglers: StepTimes | None = None
    assumed: tuple[str, ...] = ()
    unplayed: tuple[str, ...] = ()
    by_sample: bool = False

    @property
    def batch(self) -> int:
        return self.micro_batch * self.micros * self.plan.replicas

    @property
    def served(self) -> bool:
        """Whether the schedule has a timetable of so many micro-batches."""
        plan = self.plan
        return plan.pp == 1 or serves(plan.schedule, plan.pp, self.micros, self.model.n_layer)

    @property
    def known(self) -> bool:
        """Whether prices of such models have been held beside measurements."""
        return self.model.measured
