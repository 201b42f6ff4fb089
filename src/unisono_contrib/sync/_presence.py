"""Which parameters have a gradient, where a policy keeps sums of several steps and zeros stand for none."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from unisono.comm.group import Group


def numbered(names: Iterable[str], group: Group, like: Tensor) -> tuple[Mapping[str, int], int]:
    """(a row for each of this rank's names, the number of all names): the same name has the same row on every rank of
    `group`. like: any tensor on the device whose collectives `group` plays. Every rank calls it, or it hangs."""
    keys = {name: int.from_bytes(blake2b(name.encode(), digest_size=7).digest()) for name in names}
    longest = int(group.all_gather(like.new_tensor([len(keys)], dtype=torch.int64)).max())
    mine = like.new_full((1, longest), -1, dtype=torch.int64)
    mine[0, : len(keys)] = like.new_tensor(sorted(keys.values()), dtype=torch.int64)
    known = sorted({*group.all_gather(mine).flatten().tolist()} - {-1})
    place = {key: row for row, key in enumerate(known)}
    return {name: place[key] for name, key in keys.items()}, len(known)


@dataclass(frozen=True)
class GradientPresence:
    """A parameter is a whole: of the ranks of a replica between which it is split, some may hold zeros alone, such as
    the rows of bytes that no sample had, and its update is for all of them or for none. As here: one rank has all."""

    rows: Mapping[str, int] = field(default_factory=dict)
    count: int = 0
    replica: Group | None = None

    @classmethod
    def among(cls, names: Iterable[str], replica: Group | None, like: Tensor) -> "GradientPresence":
        """names: of this rank's parameters. Every rank of the replica calls it, or it hangs."""
        if replica is None or replica.size == 1:
            return cls()
        return cls(*numbered(names, replica, like), replica)

    @torch.no_grad()
    def nonzero(self, values: Mapping[str, Tensor], needed: Set[str] | None = None) -> Set[str]:
        """Names of those of `values` that are not zero everywhere, on whichever rank. needed: which names are looked
        for, all if None; where one rank has all, no other value is read. Every rank calls it."""
        if self.replica is None and needed is not None:
            values = {name: value for name, value in values.items() if name in needed}
        if not values and self.replica is None:
            return frozenset()
        there = torch.stack([value.any() for value in values.values()]) if values else torch.zeros(0)
        if self.replica is not None:
            line = torch.zeros(self.count, device=there.device)
            rows = torch.tensor([self.rows[name] for name in values], device=there.device, dtype=torch.int64)
            line[rows] = there.float()
            there = self.replica.all_reduce(line)[rows]
        return {name for name, has in zip(values, there.tolist(), strict=True) if has}
