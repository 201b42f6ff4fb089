"""Gossip: replicas that hear a few others after their steps, and all others seldom.

Most steps end with messages to the neighbours of a graph. In some, all replicas meet: losses, requests to stop and bad
steps are told then, running statistics are averaged, and the distance from consensus is measured. The last step of a
run is one of these, and gives all replicas the mean, which is published.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.sync._outer import OuterSync, Site
from unisono_contrib.sync._graphs import Beat, Matrix, heard_by, mixing
from unisono_contrib.sync._peers import Peers, packed, unpacked


class GossipSync(OuterSync):
    """What all kinds of gossip have in common. What a kind mixes are its `parts`, as many and of the same shapes on all
    replicas; their mean is the run's weights."""

    def __init__(self, site: Site, beat: Beat, codec: str = "") -> None:
        super().__init__(site)
        self.beat = beat
        self.local = {slot.name: slot.master.detach() for slot in site.learning()}
        self.peers = Peers(self.group, site.device, codec)
        self._distance: float | None = None
        self._mean: list[Tensor] | None = None  # of all, after the last step
        self._number: int | None = None  # of the round under way

    @property
    def masters(self) -> list[Tensor]:
        return list(self.local.values())

    def parts(self) -> list[Tensor]:
        """Of each of `local`, what this replica brings into the mean over all."""
        return self.masters

    def mass(self) -> float:
        """How much this replica counts in that mean, with the parts multiplied by it already."""
        return 1.0

    @abstractmethod
    def talk(self, number: int) -> None:
        """Round `number`: say and hear. Nothing that is kept changes."""

    @abstractmethod
    def take(self) -> None:
        """Weights and what is kept become what was agreed on in the round. Nothing is sent."""

    @abstractmethod
    def end(self, mean: Sequence[Tensor]) -> None:
        """After the last step of the run: this replica becomes the mean of all."""

    def meets(self, step: int) -> bool:
        return (step + 1) % self.beat.report == 0 or step + 1 == self.site.steps

    def exchange(self, step: int) -> None:
        mean = self._meet() if self.meets(step) else None
        if step + 1 == self.site.steps:
            self._mean = mean
            return
        self._number = self.beat.round_after(step)
        if self._number is not None:
            self.talk(self._number)

    @torch.no_grad()
    def merge(self, step: int) -> None:
        if self._mean is not None:
            self.end(self._mean)
        elif self._number is not None:
            self.take()
        self._mean, self._number = None, None

    def matrix(self, number: int) -> Matrix:
        """Of a round."""
        return mixing(self.beat.graph, self.group.size, number, self.site.coder.seed)

    def neighbours(self, matrix: Matrix) -> tuple[list[int], list[int]]:
        """The other replicas that hear this one, and those that it hears."""
        me = self.group.index
        return heard_by(matrix, me), [j for j in matrix[me] if j != me]

    def heard(self, flats: Sequence[Tensor], matrix: Matrix) -> dict[int, list[Tensor]]:
        """By replica, what those say whom this one hears in a round, and it itself."""
        to, sources = self.neighbours(matrix)
        return {self.group.index: list(flats), **self.peers.swap(dict.fromkeys(to, flats), sources, flats)}

    @torch.no_grad()
    def mean(self) -> list[Tensor]:
        """The mean of all replicas, like `local`. Every replica calls it, or it hangs."""
        group, parts = self.group, self.parts()
        if group.size == 1:
            return [x / self.mass() if self.mass() != 1.0 else x.clone() for x in parts]
        mass = torch.tensor([self.mass()], dtype=torch.float64, device=self.site.device)
        total = float(group.all_reduce(mass))
        # Each is divided before the sum, since that of low-precision weights would lose what it carries.
        flats = [group.all_reduce(flat.to(_wide(flat.dtype)).div(total)) for flat in packed(parts)]
        return unpacked(flats, parts)

    def center(self) -> Mapping[str, Tensor]:
        pairs = zip(self.local.items(), self.mean(), strict=True)
        return {name: x.to(local.dtype) for (name, local), x in pairs}

    @torch.no_grad()
    def _meet(self) -> list[Tensor]:
        self.average_buffers()
        mean, mass = self.mean(), self.mass()
        apart = [
            torch.sum((x.double() / mass - center.double()) ** 2)
            for name, x, center in zip(self.local, self.parts(), mean, strict=True)
            if name in self.site.counted
        ]
        zero = torch.zeros((), dtype=torch.float64, device=self.site.device)
        self._distance = self.mean_distance(torch.stack(apart).sum() if apart else zero)
        return mean

    def agree(self) -> None:
        """What was under way when a rank was lost is forgotten: each replica has weights of its own anyway."""
        self._mean, self._number = None, None

    def metrics(self) -> Mapping[str, Any]:
        distance, self._distance = self._distance, None
        return {**self.inner.metrics(), **({} if distance is None else {"consensus": distance})}

    def is_private(self, key: str) -> bool:
        return key in self.private_state() or self.inner.is_private(key)

    def private_state(self) -> Mapping[str, Tensor]:
        """What this replica keeps beside its weights: live tensors, which a checkpoint may fill."""
        return {}

    def state(self) -> Mapping[str, Tensor]:
        return {**self.inner.state(), **self.private_state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """A replica that the checkpoint does not know begins anew with the weights that it was given."""
        self.inner.load(state)
        if not self.private_state().keys() <= state.keys():
            self.begin()

    def begin(self) -> None:
        """What is kept is as for a replica that has these weights and no history."""
        return None


def weighted(parts: Mapping[int, Sequence[Tensor]], row: Mapping[int, Any]) -> list[Tensor]:
    """The sum of what some replicas said, each times its weight, in the replicas' order, at least in float32."""
    sums: list[Tensor] = []
    for j, weight in sorted(row.items()):
        if not sums:
            sums = [flat.to(_wide(flat.dtype)) * float(weight) for flat in parts[j]]
        else:
            sums = [total.add_(flat, alpha=float(weight)) for total, flat in zip(sums, parts[j], strict=True)]
    return sums


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
