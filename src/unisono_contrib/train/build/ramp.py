"""What `[ramp]` of a recipe changes of a run: its batches, which say how many leaves a step has."""

import torch

from unisono.config import Recipe
from unisono.train.data.dataset import Dataset
from unisono.train.data.feed import Permuted
from unisono_contrib.config.sections.ramp import RampConfig
from unisono_contrib.train.data.ramped import Ramped


def batches(
    section: RampConfig, recipe: Recipe, dataset: Dataset, device: torch.device, dtype: torch.dtype
) -> Ramped:
    """Batches of growing size. Raises UsageError D05 where the dataset has fewer samples than one of them."""
    train = recipe.train

    def of(global_batch: int, shift: int) -> Permuted:
        return Permuted(
            dataset, recipe.seed, global_batch, train.micro_batch or 1, device, dtype=dtype,
            origin=recipe.data.source, shift=shift,
        )  # fmt: skip

    of(train.global_batch, 0).close()  # too few samples are said at the start
    return Ramped(section.sizes(train), of)
