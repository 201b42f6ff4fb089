"""CHOCO-SGD: compressed gossip (Koloskova et al. 2019), on a graph that is always the same.

Of each replica there is a public copy, which its neighbours have alike. A round sends through the codec what a
replica's weights differ from its own public copy; all who have that copy add what they decode. Weights then take a step
`gamma` towards the weighted mean of the public copies. What the codec loses stays in the difference, and is sent later.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.codecs import BucketMemory
from unisono.sync._outer import Site
from unisono_contrib.sync._gossip import GossipSync, weighted
from unisono_contrib.sync._graphs import Beat
from unisono_contrib.sync._payloads import decode, encode
from unisono_contrib.sync._peers import packed, unpacked


class ChocoSync(GossipSync):
    """State, private to a replica: `NAME/public`, its own public copy. Copies of neighbours are not kept in
    checkpoints: the first round after a start fetches them whole, so that all who have one have it alike."""

    def __init__(self, site: Site, beat: Beat, gamma: float) -> None:
        super().__init__(site, beat, site.coder.called if site.coder.loses else "")
        self.gamma = gamma
        self.public = {name: x.clone() for name, x in self.local.items()}
        self.copies: dict[int, list[Tensor]] = {}
        """By neighbour, its public copy, packed; none before they were fetched."""
        by: dict[torch.dtype, list[str]] = {}
        for name, x in self.local.items():
            by.setdefault(x.dtype, []).append(name)
        self._names = [tuple(names) for names in by.values()]

    def talk(self, number: int) -> None:
        self._row = (matrix := self.matrix(number))[self.group.index]
        to, sources = self.neighbours(matrix)
        public = packed(list(self.public.values()))
        if self.copies.keys() != set(sources):
            self.copies = self.peers.swap(dict.fromkeys(to, public), sources, public)
        differences = [x - copy for x, copy in zip(packed(self.masters), public, strict=True)]
        memories = [self._memory(names, number) for names in self._names]
        payloads = [
            encode(self.site.coder, x, self._shapes(names), memory)
            for x, names, memory in zip(differences, self._names, memories, strict=True)
        ]
        said = [x for payload in payloads for x in payload]
        everybody = {self.group.index: said, **self.peers.swap(dict.fromkeys(to, said), sources, said)}
        self._news = {j: self._decoded(said, payloads, public, memories) for j, said in everybody.items()}

    def take(self) -> None:
        me = self.group.index
        mine = packed(list(self.public.values()))
        for j, news in self._news.items():
            for copy, part in zip(mine if j == me else self.copies[j], news, strict=True):
                copy.add_(part)
        mean = weighted({**self.copies, me: mine}, self._row)
        for x, to, copy in zip(
            self.masters,
            unpacked(mean, self.masters),
            unpacked(mine, self.masters),
            strict=True,
        ):
            x.copy_(x + self.gamma * (to - copy))
        self._publish(unpacked(mine, self.masters))
        self._news = {}

    def end(self, mean: Sequence[Tensor]) -> None:
        for x, value in zip(self.masters, mean, strict=True):
            x.copy_(value)

    def private_state(self) -> Mapping[str, Tensor]:
        return {f"{name}/public": x for name, x in self.public.items()}

    @property
    def copied(self) -> Sequence[Tensor]:
        return [x for parts in self.copies.values() for x in parts]

    @torch.no_grad()
    def begin(self) -> None:
        self._publish(self.masters)

    def agree(self) -> None:
        """Copies of neighbours are fetched anew, since some may have added what others have not."""
        super().agree()
        self.copies = {}

    def _publish(self, values: Sequence[Tensor]) -> None:
        for copy, value in zip(self.public.values(), values, strict=True):
            copy.copy_(value)

    def _shapes(self, names: Sequence[str]) -> list[torch.Size]:
        return [self.local[name].shape for name in names]

    def _memory(self, names: tuple[str, ...], number: int) -> BucketMemory:
        """As of a group of one. What a codec draws must be alike for all who play it."""
        alike = tuple({} for _ in names)
        return BucketMemory({}, alike, names, number, self.site.coder.seed)

    def _decoded(
        self,
        said: Sequence[Tensor],
        payloads: Sequence[Sequence[Tensor]],
        like: Sequence[Tensor],
        memories: Sequence[BucketMemory],
    ) -> list[Tensor]:
        """What somebody said, decoded, of each dtype. payloads: this replica's own, which are cut alike."""
        rest = iter(said)
        return [
            decode(self.site.coder, [next(rest) for _ in payload], x, self._shapes(names), memory)
            for payload, x, names, memory in zip(payloads, like, self._names, memories, strict=True)
        ]
