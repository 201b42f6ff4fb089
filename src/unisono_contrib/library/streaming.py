"""Shards for a loop of one's own: global batches in an order of seed and epoch alone, and a state of one number.

    loader = StreamingLoader("tar:s3://bucket/{000..049}.tar", global_batch=256, image=(3, 224, 224), seed=1)
    for inputs, targets, samples in loader:
        ...
        torch.save({"model": ..., "data": loader.state_dict()}, path)

`state_dict` and `load_state_dict` are called as torchdata's are. A state is the same on every rank, and may be loaded
on any number of ranks.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from unisono.config import DataConfig, ModelConfig
from unisono.launch.env import place_here
from unisono.library.current_batch import part
from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Foreseen, Ordered, fetched
from unisono.train.data.load import load
from unisono.train.data.order import samples_at

_VERSION = 1


class StreamedBatch(NamedTuple):
    """This rank's part of a global batch. inputs: float32 [n, C, H, W] in 0..1, or int64 [n, context]. targets: int64
    [n], or [n, context]. samples: int64 [n], their numbers in the data set."""

    inputs: Tensor
    targets: Tensor
    samples: Tensor


class StreamingLoader:
    """Iterates over this rank's parts of global batches.

    source: as `data.source` of a recipe says it; any source will do. global_batch: samples of a step over all ranks;
    parts of ranks differ by one sample at most. image: [C, H, W] of pictures. context: tokens of a window of text.
    seed: of the order. epochs: passes over the data, after which the last batch may be smaller; no end where None.
    rank, world: this process among those that share a batch; torch.distributed's, or as torchrun, Slurm or MPI
    started it, where None. ahead: batches that are read before they are asked for. data: other keys of a recipe's
    [data].
    Raises UsageError, as `load` does.
    """

    def __init__(
        self,
        source: str,
        global_batch: int,
        *,
        image: Sequence[int] | None = None,
        context: int | None = None,
        seed: int = 0,
        epochs: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        ahead: int = 2,
        **data: Any,
    ) -> None:
        if global_batch < 1 or ahead < 0:
            raise ValueError(f"batches of {global_batch} samples, {ahead} of them ahead")
        keys = {"kind": "convnet", "image": tuple(image)} if image else {"context": context or 1024}
        settings = DataConfig(source=source, **{"val_fraction": 0.0, **data})
        self.corpus = load(settings, ModelConfig.model_validate(keys))
        self._global_batch, self._seed, self._epochs, self._ahead = global_batch, seed, epochs, ahead
        self._rank, self._world = _place(rank, world)
        self._position = 0

    def __len__(self) -> int:
        """Global batches of all epochs. Raises TypeError where there is no end."""
        if self._epochs is None:
            raise TypeError("a loader without `epochs` has no length")
        return (self._epochs * len(self.corpus.train) + self._global_batch - 1) // self._global_batch

    def __iter__(self) -> Iterator[StreamedBatch]:
        """The batches from the state on. A loader that is at its end begins again."""
        if self._end is not None and self._position >= self._end:
            self._position = 0
        waiting: deque[tuple[int, Future[StreamedBatch]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="unisono-loader") as pool:
            try:
                at = self._position
                while True:
                    while len(waiting) <= self._ahead and (self._end is None or at < self._end):
                        until = (
                            at + self._global_batch
                            if self._end is None
                            else min(at + self._global_batch, self._end)
                        )
                        waiting.append((until, pool.submit(self._read, at, until)))
                        at = until
                    if not waiting:
                        return
                    until, batch = waiting.popleft()
                    read = batch.result()
                    self._position = until
                    yield read
            finally:
                for _, batch in waiting:
                    batch.cancel()

    @property
    def _end(self) -> int | None:
        """Samples of all epochs."""
        return None if self._epochs is None else self._epochs * len(self.corpus.train)

    def _read(self, first: int, end: int) -> StreamedBatch:
        dataset = self.corpus.train
        if isinstance(dataset, Foreseen):
            dataset.expect(self._seed, first)
        low, high = part(end - first, self._rank, self._world)
        positions = np.arange(first + low, first + high, dtype=np.int64)
        numbers = (
            dataset.numbers_at(self._seed, positions)
            if isinstance(dataset, Ordered)
            else samples_at(self._seed, positions, len(dataset))
        )
        if not len(numbers):  # more ranks than samples in a last batch
            inputs, targets = (each[:0] for each in dataset.fetch(np.zeros(1, np.int64)))
        else:
            inputs, targets = fetched(dataset, self._seed, positions, numbers)
        return StreamedBatch(inputs, targets, torch.from_numpy(numbers))

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, after the batch that it got last: a few plain values, the same on every rank."""
        return {
            "version": _VERSION,
            "position": self._position,
            "seed": self._seed,
            "samples": len(self.corpus.train),
            "data": self.corpus.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there with the next iteration, on any number of ranks, with batches of any size. Raises UsageError D19
        for the state of other data or another version."""
        then = {key: state.get(key) for key in ("version", "samples", "data")}
        now = {key: self.state_dict()[key] for key in then}
        if then != now:
            raise UsageError(
                f"the state of the loader is of other data: {then}, and these are {now}",
                code="D19",
                where=self.corpus.origin,
                likely="shards were added or written anew since",
                fix="the shards as they were, or a new run",
            )
        self._position, self._seed = int(state["position"]), int(state["seed"])


def _place(rank: int | None, world: int | None) -> tuple[int, int]:
    """(rank, ranks). Raises ValueError where the one is not among the other."""
    joined = dist.is_available() and dist.is_initialized()
    started = None if joined else place_here()
    here = (started.rank, started.world) if started else (0, 1)
    if joined:
        here = dist.get_rank(), dist.get_world_size()
    rank, world = here[0] if rank is None else rank, here[1] if world is None else world
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}")
    return rank, world
