"""What `[ramp]` of a recipe changes of a run: its batches, and where asked its learning rate."""

from collections.abc import Callable, Mapping

import torch

from unisono.config import Recipe
from unisono.parallel.precision import dtype_of
from unisono.plan import Plan
from unisono.train.data.dataset import Corpus, Dataset
from unisono.train.data.feed import Permuted
from unisono.train.step.run import Run
from unisono_contrib.config.sections.ramp import RampConfig, smoothing_of
from unisono_contrib.train.data.ramped import Ramped
from unisono_contrib.train.step.noise_scale import NoiseScale
from unisono_contrib.train.step.ramp import KnownSizes, NoiseRamp, count_samples, scale_rate

EVERY = 20
"""Steps between two looks where nobody says: as many as the default means of noise and signal go back."""


def batches(
    section: RampConfig,
    recipe: Recipe,
    plan: Plan,
    dataset: Dataset,
    device: torch.device,
    kept: Mapping[str, torch.Tensor],
) -> Ramped:
    """Batches of growing size. Raises UsageError D05 where the dataset has fewer samples than one of them."""
    train = recipe.train

    def of(global_batch: int, shift: int) -> Permuted:
        return Permuted(
            dataset, recipe.seed, global_batch, train.micro_batch or 1, device, dtype=dtype_of(plan.precision),
            origin=recipe.data.source, shift=shift,
        )  # fmt: skip

    of(train.global_batch, 0).close()  # too few samples are said at the start
    return Ramped(KnownSizes.among(kept, section.first) if section.measured else section.ramp(train), of)


def around(section: RampConfig, recipe: Recipe, corpus: Corpus) -> Callable[[Run], Run]:
    """Decides the sizes where these follow the noise scale, and scales the learning rate where asked."""
    train = recipe.train
    ramp = NoiseRamp(NoiseScale(smoothing_of(recipe)), section.sizes(train), section.every or EVERY)

    def change(run: Run) -> Run:
        run = ramp.attach(run) if section.measured else run
        sizes = ramp.known if section.measured else section.ramp(train)
        if section.schedule == "samples":
            run = count_samples(run, sizes, train.steps)
        if section.scale_lr:
            run = scale_rate(run, sizes, lambda batch: train.lr_factor(batch / train.global_batch))
        return run

    return change
