"""What a player is to those around it: it is given micro-batches and plays a row of a timetable with them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from unisono.models.documents import Documents
from unisono.models.noise import Noise
from unisono.programs.pipeline import Action


class Leaf(Protocol):
    """One micro-batch: inputs [b, ...], targets [b, ...], the global position of each sample [b] int64.

    documents: int64 [b, T], which document of its window each position belongs to; None where a window is one. scale:
    all targets of its global batch over those that count, by what its loss is multiplied.
    """

    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def samples(self) -> Tensor: ...
    @property
    def documents(self) -> Tensor | None: ...
    @property
    def scale(self) -> float: ...


def noise_of(leaf: Leaf, seed: int | None, weight: float = 0.0, micro: int = 0) -> Noise | None:
    """What blocks are told of a leaf; None where there is nothing to tell. seed: None in evaluation."""
    documents = None if leaf.documents is None else Documents.of(leaf.documents)
    if seed is None and documents is None:
        return None
    return Noise(seed, leaf.samples, weight if seed is not None else 0.0, micro, documents)


class BackwardCall(NamedTuple):
    """A backward that gives weights their gradients. last: this stage's last of the step; final: this rank's."""

    stage: int
    micro: int
    last: bool
    final: bool


class Player(ABC):
    """Plays rows of a timetable. What stands around a player, as a guard does, is a player too."""

    @abstractmethod
    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        """The loss × weight × scale of each leaf, [leaves], on the rank of the last stage; zeros elsewhere.

        weight: what one token's loss counts for. seed: None in evaluation, without dropout. Gradients accumulate on
        the parameters.
        """

    def watch_sizes(self) -> dict[int, float] | None:
        """A dict that holds, after each `play` from now on, how large what the loss of each leaf is a sum of is, times
        weight × scale: by that a rounding error counts where terms cancel. None where a loss is a sum of positive
        terms, and so as large as they are."""
        return None
