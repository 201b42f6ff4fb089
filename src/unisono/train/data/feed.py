"""The batches of one data rank: which samples, in which leaf, of which step.

The global batch of a step is a line of positions, step * G .. step * G + G - 1, cut into leaves of one
micro-batch each: leaf j holds positions step * G + j * mb and the mb - 1 after it. A feed serves the leaves
that its rank computes. It has no state but the step that one asks for.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from unisono.train.data.dataset import Dataset, require_samples
from unisono.train.data.order import samples_at

_BLOCK = 4096  # positions whose samples are looked up together


@dataclass(frozen=True, slots=True)
class Micro:
    """One leaf: `samples` are global positions (int64 [mb]), by which randomness is drawn; `count` are its targets."""

    inputs: Tensor
    targets: Tensor
    samples: Tensor
    count: int


def leaves_of(rank: int, ranks: int, leaves: int) -> range:
    """The stretch of leaves that data rank `rank` of `ranks` computes. Raises ValueError if they do not divide."""
    share, rest = divmod(leaves, ranks)
    if rest:
        raise ValueError(f"{leaves} leaves cannot be dealt evenly to {ranks} data ranks")
    return range(rank * share, (rank + 1) * share)


class Feed:
    """Batches by step number, the same for the same arguments in every process.

    dataset: the samples. seed: of the order. global_batch: samples in a step. micro_batch: samples in a leaf.
    leaves: numbers of the leaves that this rank computes. device: where the tensors shall lie. dtype: of inputs
    that are not integers, as the dataset gives them if None. origin: the data's name, for messages.
    repeat: allow a step to contain a sample twice: validation sets may be smaller than a batch, or empty, which
    `samples` tells.
    prefetch: read one step ahead in a thread; by itself only towards a GPU.
    Raises UsageError D05 where the dataset has fewer samples than a step, unless `repeat`.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        global_batch: int,
        micro_batch: int,
        leaves: range,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype | None = None,
        origin: str = "",
        repeat: bool = False,
        prefetch: bool | None = None,
    ) -> None:
        if not repeat:
            require_samples(len(dataset), global_batch, origin)
        if (
            micro_batch < 1
            or global_batch % micro_batch
            or (leaves and max(leaves) * micro_batch >= global_batch)
        ):
            raise ValueError(f"leaves {leaves} of {micro_batch} do not lie in a batch of {global_batch}")
        self._dataset, self._seed = dataset, seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._device, self._dtype = torch.device(device), dtype
        starts = np.asarray(leaves, dtype=np.int64)[:, None] * micro_batch
        self._offsets = (starts + np.arange(micro_batch, dtype=np.int64)).reshape(-1)
        self._block_steps = max(1, _BLOCK // max(1, len(self._offsets)))
        self._block: tuple[int, np.ndarray] = (-1, self._offsets[None])
        self._pinned = self._device.type == "cuda"
        if self._pinned and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        ahead = self._pinned if prefetch is None else prefetch
        self._read: Callable[[int], _Rows] = _Ahead(self._gather, self._enter) if ahead else self._gather

    @property
    def samples(self) -> int:
        """Different samples behind this feed; 0 if there is nothing to fetch."""
        return len(self._dataset)

    def fetch(self, step: int) -> list[Micro]:
        """The leaves of step `step` (from 0), in the order of `leaves`; copies to a GPU are asynchronous.

        Raises ValueError if there are no samples at all, UsageError D09 where a token file holds a wrong token.
        """
        rows = [part.to(self._device, non_blocking=True) for part in self._read(step)]
        if len(self._offsets) == self._micro_batch:
            inputs, targets, samples = rows
            return [Micro(inputs, targets, samples, targets.numel())]
        cut = [part.split(self._micro_batch) for part in rows]
        return [
            Micro(inputs, targets, samples, targets.numel())
            for inputs, targets, samples in zip(*cut, strict=True)
        ]

    def close(self) -> None:
        """Ends the reading-ahead. A feed on the CPU has none, and may be forgotten."""
        if isinstance(self._read, _Ahead):
            self._read.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self) -> None:
        """A new thread stands on GPU 0: pinning there would cost each rank memory on a GPU that is not its own."""
        if self._pinned:
            torch.cuda.set_device(self._device)

    def _gather(self, step: int) -> "_Rows":
        """All of this rank's samples of a step in one go: one gather is cheaper than one per leaf."""
        positions = self._offsets + step * self._global_batch
        inputs, targets = self._dataset.fetch(self._numbers(step))
        if self._dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._dtype)
        rows = (inputs, targets, torch.from_numpy(positions))
        return tuple(part.pin_memory() for part in rows) if self._pinned else rows  # type: ignore[return-value]

    def _numbers(self, step: int) -> np.ndarray:
        """Dataset indices of a step. Computed for a block of steps: numpy's cost is per call at this size."""
        block, row = divmod(step, self._block_steps)
        known, numbers = self._block
        if known != block:
            steps = np.arange(block * self._block_steps, (block + 1) * self._block_steps, dtype=np.int64)
            positions = steps[:, None] * self._global_batch + self._offsets
            numbers = samples_at(self._seed, positions.reshape(-1), len(self._dataset)).reshape(
                positions.shape
            )
            self._block = (block, numbers)
        return numbers[row]


_Rows = tuple[Tensor, Tensor, Tensor]


class _Ahead:
    """Reads step + 1 in a thread while step is computed. A step out of order is read where it is asked for."""

    def __init__(self, read: Callable[[int], _Rows], enter: Callable[[], None]) -> None:
        self._inner = read
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unisono-feed", initializer=enter)
        self._next: tuple[int, Future[_Rows]] | None = None

    def __call__(self, step: int) -> _Rows:
        rows = self._next[1].result() if self._next and self._next[0] == step else self._inner(step)
        self._next = (step + 1, self._pool.submit(self._inner, step + 1))
        return rows

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
