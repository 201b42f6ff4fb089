"""What a player is to those around it: it is given micro-batches and plays a row of a timetable with them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from unisono.programs.pipeline import Action


class Leaf(Protocol):
    """One micro-batch: inputs [b, ...], targets [b, ...], the global position of each sample [b] int64."""

    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def samples(self) -> Tensor: ...


class Turn(NamedTuple):
    """A backward that gives weights their gradients. last: this stage's last of the step; final: this rank's."""

    stage: int
    micro: int
    last: bool
    final: bool


class Player(ABC):
    """Plays rows of a timetable. What stands around a player, as a guard does, is a player too."""

    @abstractmethod
    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        """The loss × weight of each leaf, [leaves], on the rank of the last stage; zeros elsewhere.

        weight: what one token's loss counts for. seed: None in evaluation, without dropout. Gradients accumulate on
        the parameters.
        """
