"""Batches that grow: the order of samples is that of a run without a ramp, cut at other places."""

from collections.abc import Callable, Collection
from typing import Protocol

from unisono.train.data.feed import Feed, Micro, Permuted


class StepSizes(Protocol):
    """Which samples each step has."""

    def samples(self, step: int) -> int:
        """Samples of a step, from 0."""
        ...

    def before(self, step: int) -> int:
        """Samples of all steps before this one, together."""
        ...


class Ramped(Feed):
    """Each step begins where the one before has ended. sizes: of the steps. of(global_batch, shift): a feed of batches
    of one size, whose steps begin `shift` positions later in the order than at step * global_batch."""

    def __init__(self, sizes: StepSizes, of: Callable[[int, int], Permuted]) -> None:
        self._sizes, self._of = sizes, of
        self._at_shift, self._inner = (-1, 0), None

    def _at(self, step: int) -> Permuted:
        size = self._sizes.samples(step)
        at = (size, self._sizes.before(step) - step * size)
        if self._inner is None or at != self._at_shift:
            self.close()
            self._at_shift, self._inner = at, self._of(*at)
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
        return self._sizes.before(step)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
