"""Batches: which samples, in which leaf, of which step.

The global batch of a step is a line of positions, step * G .. step * G + G - 1, cut into leaves of one
micro-batch each: leaf j holds positions step * G + j * mb and the mb - 1 after it. Who asks for which leaf may
change from step to step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unisono.comm.device import adopt, is_apart, numbered, pinned
from unisono.train.data.dataset import Dataset, Foreseen, Uneven, fetched, numbers_at, require_samples

_BLOCK = 4096  # positions whose samples are looked up together


@dataclass(frozen=True, slots=True)
class Micro:
    """One leaf, as `parallel.player.Leaf` says. samples: by these positions randomness is drawn."""

    inputs: Tensor
    targets: Tensor
    samples: Tensor
    documents: Tensor | None = None
    scale: float = 1.0


class Feed(ABC):
    """Leaves by step and number, the same in every process that asks."""

    @abstractmethod
    def fetch(self, step: int, leaves: range) -> list[Micro]:
        """The leaves of these numbers, ascending, of step `step` (from 0)."""

    @abstractmethod
    def count(self, step: int) -> int:
        """Leaves of this step, over all ranks."""

    def samples_of(self, step: int, leaf: int) -> list[int]:
        """Numbers of a leaf's samples in the data set; none where they have no numbers."""
        return []

    def share(self, step: int, leaves: Collection[int]) -> float:
        """The share of these leaves in all targets of step `step` that count. Raises NotImplementedError where nobody
        knows."""
        raise NotImplementedError

    def samples_before(self, step: int) -> int:
        """Samples of all steps before this one, together. Raises NotImplementedError where nobody knows."""
        raise NotImplementedError

    def close(self) -> None:
        """End what reads ahead."""
        return None


class Permuted(Feed):
    """Batches of a dataset that can be read anywhere, in an order drawn anew for each epoch.

    dataset: the samples. seed: of the order. global_batch: samples in a step. micro_batch: samples in a leaf.
    device: where the tensors shall lie. dtype: of inputs that are not integers, as the dataset gives them if None.
    origin: the data's name, for messages.
    repeat: allow a step to contain a sample twice: validation sets may be smaller than a batch, or empty, which
    `samples` tells.
    every, first: of each `every` batches of the order, a step is the one numbered `first`; others read the rest.
    shift: positions by which a step begins later in the order than at step * global_batch.
    prefetch: read one step ahead in a thread; by itself towards a GPU, and where the dataset is slow.
    Raises UsageError D05 where the dataset has fewer samples than a step, unless `repeat`.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        global_batch: int,
        micro_batch: int,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype | None = None,
        origin: str = "",
        repeat: bool = False,
        prefetch: bool | None = None,
        every: int = 1,
        first: int = 0,
        shift: int = 0,
    ) -> None:
        if not repeat:
            require_samples(len(dataset), global_batch, origin)
        if micro_batch < 1 or global_batch % micro_batch:
            raise ValueError(f"leaves of {micro_batch} do not fill a batch of {global_batch}")
        self._dataset, self._seed = dataset, seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._every, self._first, self._shift = every, first, shift
        self._device, self._dtype = torch.device(device), dtype
        self._stretch = self._whole = _Stretch(range(0), np.zeros(0, dtype=np.int64))
        self._pinned, self._device = is_apart(self._device), numbered(self._device)
        slow = isinstance(dataset, Foreseen) and dataset.is_slow
        ahead = (self._pinned or slow) if prefetch is None else prefetch
        self._read: Callable[[int, range], _Rows] = (
            _Ahead(self._gather, self._enter) if ahead else self._gather
        )

    @property
    def samples(self) -> int:
        """Different samples behind this feed; 0 if there is nothing to fetch."""
        return len(self._dataset)

    def fetch(self, step: int, leaves: range) -> list[Micro]:
        """Return these leaves of step `step` (from 0); copies to a GPU are asynchronous.

        Raises ValueError if there are no samples at all, or no such leaves, UsageError D09 where a token file holds a
        wrong token.
        """
        rows = [part.to(self._device, non_blocking=True) for part in self._read(step, leaves)]
        scale = self._scale(step, rows[1]) if leaves else 1.0
        cut = [part.split(self._micro_batch) for part in rows] if len(leaves) > 1 else [[x] for x in rows]
        return [
            Micro(inputs, targets, samples, *documents, scale=scale)
            for inputs, targets, samples, *documents in zip(*cut, strict=True)
        ]

    def count(self, step: int) -> int:
        return self._global_batch // self._micro_batch

    def samples_of(self, step: int, leaf: int) -> list[int]:
        return self._numbers(self._stretch_of(range(leaf, leaf + 1)), step).tolist()

    def share(self, step: int, leaves: Collection[int]) -> float:
        whole = self._counted(step, range(self._global_batch // self._micro_batch))
        return sum(self._counted(step, range(leaf, leaf + 1)) for leaf in leaves) / max(1, whole)

    def _counted(self, step: int, leaves: range) -> int:
        """Targets of these leaves that count; samples, where all targets do."""
        stretch = self._stretch_of(leaves)
        counted = None
        if isinstance(self._dataset, Uneven):
            counted = self._dataset.counted(self._numbers(stretch, step))
        return len(stretch.offsets) if counted is None else int(counted.sum())

    def samples_before(self, step: int) -> int:
        return step * self._global_batch + self._shift

    def close(self) -> None:
        """Ends the reading-ahead. A feed on the CPU has none, and may be forgotten."""
        if isinstance(self._read, _Ahead):
            self._read.close()

    def _enter(self) -> None:
        """A new thread stands on GPU 0: pinning there would cost each rank memory on a GPU that is not its own."""
        adopt(self._device)

    def _scale(self, step: int, targets: Tensor) -> float:
        """All targets of a step over those that count. Nobody is asked: the samples of a step are known by number."""
        if not isinstance(self._dataset, Uneven):
            return 1.0
        if self._whole.leaves != (every := range(self._global_batch // self._micro_batch)):
            self._whole = self._stretch_of(every)
        counted = self._dataset.counted(self._numbers(self._whole, step))
        if counted is None:
            return 1.0
        return self._global_batch * targets[0].numel() / max(1, int(counted.sum()))

    def _gather(self, step: int, leaves: range) -> "_Rows":
        """Read the samples of all these leaves at once: one gather is cheaper than one per leaf."""
        if self._stretch.leaves != leaves:
            self._stretch = self._stretch_of(leaves)
        begin = (step * self._every + self._first) * self._global_batch + self._shift
        positions = self._stretch.offsets + begin
        if isinstance(self._dataset, Foreseen):
            self._dataset.expect(self._seed, begin)
        chosen = self._numbers(self._stretch, step)
        inputs, targets = fetched(self._dataset, self._seed, positions, chosen)
        if self._dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._dtype)
        documents = self._dataset.documents(chosen) if isinstance(self._dataset, Uneven) else None
        rows = [inputs, targets, torch.from_numpy(positions), *([] if documents is None else [documents])]
        return [pinned(part, self._device) for part in rows] if self._pinned else rows

    def _stretch_of(self, leaves: range) -> "_Stretch":
        if leaves and not 0 <= min(leaves) <= max(leaves) < self._global_batch // self._micro_batch:
            raise ValueError(f"{leaves} of {self._micro_batch} do not lie in a batch of {self._global_batch}")
        starts = np.asarray(leaves, dtype=np.int64)[:, None] * self._micro_batch
        return _Stretch(leaves, (starts + np.arange(self._micro_batch, dtype=np.int64)).reshape(-1))

    def _numbers(self, stretch: "_Stretch", step: int) -> np.ndarray:
        """Dataset indices of a step. Computed for a block of steps: numpy's cost is per call at this size."""
        steps = max(1, _BLOCK // max(1, len(stretch.offsets)))
        block, row = divmod(step, steps)
        if stretch.block != block:
            first = np.arange(block * steps, (block + 1) * steps, dtype=np.int64)
            batches = first[:, None] * self._every + self._first
            # Steps before the first one of a shifted order have no positions, and nobody asks for them.
            positions = np.maximum(batches * self._global_batch + stretch.offsets + self._shift, 0)
            numbers = numbers_at(self._dataset, self._seed, positions.reshape(-1))
            stretch.block, stretch.numbers = block, numbers.reshape(positions.shape)
        return stretch.numbers[row]


@dataclass(slots=True)
class _Stretch:
    """The leaves that were asked for last. offsets: of their samples in the global batch. numbers: dataset indices of
    a block of steps, `block`."""

    leaves: range
    offsets: np.ndarray
    block: int = -1
    numbers: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))


_Rows = list[Tensor]  # inputs, targets, positions, and documents if there are several in a window


class _Ahead:
    """Reads step + 1 in a thread while step is computed. What is not asked for in this order, is read when it is."""

    def __init__(self, read: Callable[[int, range], _Rows], enter: Callable[[], None]) -> None:
        self._inner = read
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unisono-feed", initializer=enter)
        self._next: tuple[int, range, Future[_Rows]] | None = None

    def __call__(self, step: int, leaves: range) -> _Rows:
        if self._next is not None:
            wait([self._next[2]])  # never two readers at once
        if self._next is not None and self._next[:2] == (step, leaves):
            rows = self._next[2].result()
        else:
            rows = self._inner(step, leaves)
        self._next = (step + 1, leaves, self._pool.submit(self._inner, step + 1, leaves))
        return rows

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
