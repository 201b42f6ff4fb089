"""What `[privacy]` of a recipe changes of a run: its batches and its player."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from unisono.config import Recipe
from unisono.parallel.precision import dtype_of
from unisono.plan import Plan
from unisono.train.data.dataset import Corpus, Dataset
from unisono.train.step.run import Run
from unisono_contrib.config.sections.privacy import PrivacyConfig
from unisono_contrib.privacy.stream import secret_of
from unisono_contrib.train.data.poisson import Poisson
from unisono_contrib.train.step.private import budget_of, made_private


def batches(
    section: PrivacyConfig,
    recipe: Recipe,
    plan: Plan,
    dataset: Dataset,
    device: torch.device,
    kept: Mapping[str, torch.Tensor],
) -> Poisson | None:
    """Poisson batches, if the section asks for them. Raises UsageError C03, D05."""
    if section.sampling == "shuffle":
        return None
    train, key = recipe.train, secret_of(section.key, recipe.seed)
    return Poisson(dataset, key, train.global_batch, train.micro_batch or 1, device, dtype_of(plan.precision))


def around(section: PrivacyConfig, recipe: Recipe, corpus: Corpus) -> Callable[[Run], Run]:
    """Gradients by sample, with noise. Raises UsageError C02, C03."""
    budget = budget_of(section, recipe.train.global_batch, len(corpus.train), recipe.train.steps)
    return partial(made_private, clip=section.clip, budget=budget, key=secret_of(section.key, recipe.seed))
