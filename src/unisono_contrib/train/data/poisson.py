"""Batches of random size: each sample is in each step with the same probability, whatever else is in it."""

from collections.abc import Collection

import numpy as np
import torch

from unisono.comm.device import numbered
from unisono.train.data.dataset import Dataset, Uneven, require_samples
from unisono.train.data.feed import Feed, Micro
from unisono_contrib.privacy.stream import uniforms


class Poisson(Feed):
    """Poisson sampling (Abadi et al. 2016), as accountants assume it: sample i is in step s if a number that key, s and
    i decide is below global_batch / samples. The expected batch is `global_batch`; it may be empty, or larger.

    The samples of a step are cut into global_batch / micro_batch leaves of nearly equal size. dtype: of inputs that are
    not integers. Raises UsageError D05 where the dataset has fewer samples than a batch, ValueError where windows hold
    several documents.
    """

    def __init__(
        self,
        dataset: Dataset,
        key: bytes,
        global_batch: int,
        micro_batch: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        require_samples(len(dataset), global_batch, "the data")
        if isinstance(dataset, Uneven) and dataset.documents(np.zeros(1, dtype=np.int64)) is not None:
            raise ValueError("samples of several documents are not sampled by themselves")
        self._dataset, self._key, self._dtype = dataset, key, dtype
        self._global_batch, self._leaves = global_batch, global_batch // micro_batch
        self._device = numbered(torch.device(device))
        # Of 2^64 values so many are below; all of them where each step takes all samples.
        self._below = global_batch * 2**64 // len(dataset) if global_batch < len(dataset) else 2**64 - 1
        self._drawn: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def chosen(self, step: int) -> np.ndarray:
        """Numbers of the samples of a step, int64, ascending."""
        if self._drawn[0] != step:
            drawn = uniforms(self._key, "sample", step, "", len(self._dataset))
            self._drawn = (step, np.flatnonzero(drawn <= np.uint64(self._below)).astype(np.int64))
        return self._drawn[1]

    def _leaf(self, step: int, leaf: int) -> np.ndarray:
        numbers = self.chosen(step)
        size = len(numbers)
        return numbers[leaf * size // self._leaves : (leaf + 1) * size // self._leaves]

    def fetch(self, step: int, leaves: range) -> list[Micro]:
        scale = self._global_batch / max(1, len(self.chosen(step)))
        return [self._micro(step, self._leaf(step, leaf), scale) for leaf in leaves]

    def _micro(self, step: int, numbers: np.ndarray, scale: float) -> Micro:
        size = len(numbers)
        # An empty leaf has the shapes of one sample.
        inputs, targets = self._dataset.fetch(numbers if size else np.zeros(1, dtype=np.int64))
        if self._dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._dtype)
        places = torch.from_numpy(step * len(self._dataset) + numbers)
        inputs, targets, places = (x[:size].to(self._device) for x in (inputs, targets, places))
        return Micro(inputs, targets, places, scale=scale)

    def count(self, step: int) -> int:
        return self._leaves

    def samples_of(self, step: int, leaf: int) -> list[int]:
        return self._leaf(step, leaf).tolist()

    def samples_before(self, step: int) -> int:
        """As many as are expected."""
        return step * self._global_batch

    def share(self, step: int, leaves: Collection[int]) -> float:
        return sum(len(self._leaf(step, leaf)) for leaf in leaves) / max(1, len(self.chosen(step)))
