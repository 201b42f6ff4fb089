"""Which virtual shards lie on which rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from unisono.comm.group import Group
from unisono.parallel.parts import Cut, ends_of
from unisono_contrib.parallel.virtual.fan import solid


@dataclass(frozen=True, slots=True)
class VirtualDeal:
    """A fixed number of virtual shards of every width, of the heads, of the vocabulary and of the positions.

    tp deals the first three to its ranks, cp the positions: to each rank equally many that follow each other.
    """

    count: int
    tp: Group
    cp: Group

    @property
    def features(self) -> int:
        """Virtual shards of a width on this rank."""
        return self.count // self.tp.size

    @property
    def stretches(self) -> int:
        """Virtual shards of the positions on this rank."""
        return self.count // self.cp.size

    def sizes(self, full: int) -> list[int]:
        """Places of a width of `full` in each virtual shard of this rank; of all virtual shards, the first ones have
        one more where they cannot all have as many."""
        first = self.tp.index * self.features
        every = ends_of(full, self.count)[first : first + self.features + 1]
        return [end - start for start, end in pairwise(every)]

    def ends(self, full: int) -> list[int]:
        """Where the part of each rank of `tp` begins in a width of `full`, and its end."""
        return ends_of(full, self.count)[:: self.features]

    def cut(self, dim: int, full: int) -> Cut:
        """This rank's part of a parameter whose `dim` has `full` places."""
        start, end = self.ends(full)[self.tp.index : self.tp.index + 2]
        return Cut(dim, start, end - start, full)

    def along(self, x: Tensor, dim: int = 1) -> Sequence[Tensor]:
        """x [B, T', ...] → this rank's stretches of the positions, each by itself."""
        return [solid(part) for part in x.chunk(self.stretches, dim)]
