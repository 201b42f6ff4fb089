"""The feed of a run, around the one that reads: without micro-batches that are left out, and ahead where asked.

A loss that is not a number stays one when it is multiplied by zero, and so does its gradient. So a micro-batch that is
left out is not weighed down but *blanked*: zeros stand for its inputs and targets, its loss counts for nothing, and the
losses of the others count for so much more that the step is a mean over all targets that are left.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from unisono.train.data.feed import Feed, Micro


class FilteredFeed(Feed):
    """The leaves of `inner`; blanks instead of those that are left out.

    ahead: how many leaves of the following steps to give behind those of a step, at most, for a pipeline that is not
    emptied between steps. drains(made): whether it is to be empty after so many updates; no later leaf is given then.
    """

    def __init__(self, inner: Feed, ahead: int = 0, drains: Callable[[int], bool] = lambda _: False) -> None:
        self._inner, self._ahead, self._drains = inner, ahead, drains
        self._without: dict[int, frozenset[int]] = {}
        self._read: dict[tuple[int, range], list[Micro]] = {}

    def without(self, step: int) -> frozenset[int]:
        """Leaves that are left out of step `step`."""
        return self._without.get(step, frozenset())

    def leave_out(self, step: int, leaves: Collection[int]) -> None:
        """Leave these out whenever this step comes from now on."""
        self._without[step] = self.without(step) | frozenset(leaves)

    def forget_from(self, step: int) -> None:
        """Let steps from this one on come again whole."""
        self._without = {at: leaves for at, leaves in self._without.items() if at < step}

    def fetch(self, step: int, leaves: range) -> list[Micro]:
        if not self._ahead:
            return self._filtered(step, leaves)
        self._read = {key: read for key, read in self._read.items() if key[0] >= step}
        micros, at = list(self._once(step, leaves)), step
        while len(micros) < len(leaves) + self._ahead and not self._drains(at + 1):
            at += 1
            micros += self._once(at, leaves)
        return micros[: len(leaves) + self._ahead]

    def _once(self, step: int, leaves: range) -> list[Micro]:
        """Return these leaves; they are read once, although several steps ask for them."""
        if (step, leaves) not in self._read:
            self._read[step, leaves] = self._filtered(step, leaves)
        return self._read[step, leaves]

    def _filtered(self, step: int, leaves: range) -> list[Micro]:
        micros = self._inner.fetch(step, leaves)
        if not (without := self.without(step)):
            return micros
        scale = 1.0 / (1.0 - self._inner.share(step, without))
        return [
            blank(micro) if leaf in without else replace(micro, scale=micro.scale * scale)
            for leaf, micro in zip(leaves, micros, strict=True)
        ]

    def count(self, step: int) -> int:
        return self._inner.count(step)

    def samples_of(self, step: int, leaf: int) -> list[int]:
        return self._inner.samples_of(step, leaf)

    def share(self, step: int, leaves: Collection[int]) -> float:
        return self._inner.share(step, leaves)

    def samples_before(self, step: int) -> int:
        return self._inner.samples_before(step)

    def close(self) -> None:
        self._inner.close()


def blank(micro: Micro) -> Micro:
    """A micro-batch like this one that teaches nothing."""
    zeros = torch.zeros_like(micro.inputs), torch.zeros_like(micro.targets)
    return replace(micro, inputs=zeros[0], targets=zeros[1], scale=0.0)
