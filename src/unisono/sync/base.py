"""How replicas stay together: one live policy a run, chosen by the plan's `sync`."""

from abc import ABC, abstractmethod
from enum import Enum

from unisono.comm.bucket import Bucket


class Verdict(Enum):
    """What the step is to do with the gradient that it holds."""

    APPLY = "apply"  # step the optimiser here
    REMOTE = "remote"  # the update happened elsewhere
    DISCARD = "discard"  # this step does not count


class Sync(ABC):
    """A live policy on the `dp` axis."""

    @abstractmethod
    def weigh(self, count: int) -> float:
        """Before forward: what one target's loss counts for, given the targets that one replica holds."""

    @abstractmethod
    def grad_ready(self, bucket: Bucket) -> None:
        """During backward: this replica's gradients in `bucket` are complete."""

    @abstractmethod
    def settle(self) -> Verdict:
        """Before the update: gradients are what the update shall use when this returns."""

    @abstractmethod
    def after_update(self, step: int) -> None:
        """After the update of step number `step` (from 0)."""
