"""The outer step of NoLoCo in random pairs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.sync._outer import Site
from unisono_contrib.sync._gossip import GossipSync, weighted
from unisono_contrib.sync._graphs import Beat
from unisono_contrib.sync._peers import packed, unpacked


class NolocoSync(GossipSync):
    """Each replica has slow weights s, from which it begins a round of local steps, and their momentum m. A round ends
    with, over a pair, means of s and of what was learnt since, d = own weights - s:

        m = outer_momentum · m + outer_lr · mean(d) - drift · (s - mean(s));  s = s + m;  own weights = s

    State, private to a replica: `NAME/slow`, `NAME/outer_momentum`. "The" weights are the mean of the slow ones."""

    def __init__(self, site: Site, beat: Beat, outer_lr: float, momentum: float, drift: float) -> None:
        super().__init__(site, beat)
        self.outer_lr, self.outer_momentum, self.drift = outer_lr, momentum, drift
        self.slow = {name: x.clone() for name, x in self.local.items()}
        self.momentum = {name: torch.zeros_like(x) for name, x in self.local.items()}

    def parts(self) -> list[Tensor]:
        return list(self.slow.values())

    def talk(self, number: int) -> None:
        matrix = self.matrix(number)
        slow = packed(self.parts())
        learnt = [x - s for x, s in zip(packed(self.masters), slow, strict=True)]
        means = weighted(self.heard([*slow, *learnt], matrix), matrix[self.group.index])
        self._slow, self._learnt = means[: len(slow)], means[len(slow) :]

    def take(self) -> None:
        self._outer_step(unpacked(self._slow, self.masters), unpacked(self._learnt, self.masters))

    def exchange(self, step: int) -> None:
        super().exchange(step)
        if self._mean is not None:  # after the last step, all are one pair
            with torch.no_grad():
                share = 1.0 / self.group.size
                flats = packed([(x - s) * share for x, s in zip(self.masters, self.parts(), strict=True)])
                self._learnt = [self.group.all_reduce(flat) for flat in flats]

    def end(self, mean: Sequence[Tensor]) -> None:
        """An outer step of all together, with the mean of their momentum left out: it is each one's own."""
        for s, x, d in zip(self.slow.values(), mean, unpacked(self._learnt, self.masters), strict=True):
            s.copy_(x + self.outer_lr * d)
        self._begin_round()

    def _outer_step(self, slow: Sequence[Tensor], learnt: Sequence[Tensor]) -> None:
        states = zip(self.slow.values(), self.momentum.values(), slow, learnt, strict=True)
        for s, m, mean, d in states:
            m.mul_(self.outer_momentum).add_(self.outer_lr * d - self.drift * (s - mean))
            s.add_(m)
        self._begin_round()

    def _begin_round(self) -> None:
        for x, s in zip(self.masters, self.slow.values(), strict=True):
            x.copy_(s)

    def private_state(self) -> Mapping[str, Tensor]:
        return {
            **{f"{name}/slow": x for name, x in self.slow.items()},
            **{f"{name}/outer_momentum": x for name, x in self.momentum.items()},
        }

    @torch.no_grad()
    def begin(self) -> None:
        for name, x in self.local.items():
            self.slow[name].copy_(x)
            self.momentum[name].zero_()
