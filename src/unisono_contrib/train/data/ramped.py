"""Batches that grow: the order of samples is that of a run without a ramp, cut at other places."""

from collections.abc import Callable, Collection

from unisono.train.data.feed import Feed, Micro, Permuted
from unisono_contrib.config.sections.ramp import BatchRamp


class Ramped(Feed):
    """Each step begins where the one before has ended. ramp: samples of each step. of(global_batch, shift): a feed of
    batches of one size, whose steps begin `shift` positions later in the order than at step * global_batch."""

    def __init__(self, ramp: BatchRamp, of: Callable[[int, int], Permuted]) -> None:
        self._ramp, self._of = ramp, of
        self._size, self._inner = -1, None

    def _at(self, step: int) -> Permuted:
        size = self._ramp.samples(step)
        if self._inner is None or size != self._size:
            self.close()
            self._size, self._inner = size, self._of(size, self._ramp.before(step) - step * size)
        return self._inner

    def fetch(self, step: int, leaves: range) -> list[Micro]:
        return self._at(step).fetch(step, leaves)

    def count(self, step: int) -> int:
        return self._at(step).count(step)

    def samples_of(self, step: int, leaf: int) -> list[int]:
        return self._at(step).samples_of(step, leaf)

    def share(self, step: int, leaves: Collection[int]) -> float:
        return self._at(step).share(step, leaves)

    def samples_before(self, step: int) -> int:
        return self._ramp.before(step)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
