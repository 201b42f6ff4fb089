"""Data of each rank's own, of uneven lengths: files that were handed out beforehand, streams, shards of unlike sizes.

Every rank makes as many steps as the longest. The global batch of a step is what the ranks have left for it. A rank
that has run out computes on a sample of its last batch, with weight 0, so that nobody waits for it: Horovod's and
DDP's `join`, but a mean over samples, where theirs is one over ranks.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from unisono.library.explain import explained
from unisono.library.hand import Hand, Walk
from unisono.library.noise import Streams
from unisono.library.small import Small
from unisono.library.whole import cut, samples_in
from unisono.spec.errors import UsageError


class JoinedLoader:
    """This rank's own batches, and after them one sample again and again, until no rank has a batch left.

    Length and attributes are those of `data`. Its place is not kept in checkpoints.
    """

    def __init__(self, data: Iterable[Any], hand: Hand, small: Small, streams: Streams, number: int) -> None:
        self._data, self._hand, self._small, self._streams = data, hand, small, streams
        self._number, self._passes = number, 0

    def __iter__(self) -> Iterator[Any]:
        with explained():
            walk, self._passes = Walk(self._number, self._passes), self._passes + 1
            batches, borrowed, place = iter(self._data), None, 0
            exhausted = False
            try:
                while True:
                    batch = next(batches, None)
                    own = 0 if batch is None else samples_in(batch)
                    counts = self._small.gather(own)
                    if not sum(counts):
                        exhausted = True
                        return
                    if place == 0 and not all(counts):
                        raise self._nothing(counts.index(0))
                    if batch is not None:
                        borrowed = cut(batch, own, 0, 1)
                    self._hand.joined(borrowed if batch is None else batch, counts, walk)
                    self._streams.to_own()
                    yield borrowed if batch is None else batch
                    self._streams.to_script()
                    place += 1
            finally:
                if self._hand.ended(walk, exhausted):
                    self._streams.to_script()

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_data" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._data, name)

    def _nothing(self, rank: int) -> UsageError:
        return UsageError(
            f"rank {rank} has not one batch, so it has nothing to compute on while the others train",
            where="job.join",
            fix="at least one sample for each rank, or fewer ranks",
            code="J03",
        )
