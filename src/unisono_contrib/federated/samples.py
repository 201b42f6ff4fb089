"""Which client has which samples of the training data."""

from typing import Any

import numpy as np

from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Corpus, Dataset
from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.spec.federated import SPLITS

_BLOCK = 1024  # samples that are read together for their classes


def samples_of(recipe: Any, corpus: Corpus) -> list[np.ndarray]:
    """The training samples of each client, each sample of the data with one of them. Raises UsageError C06 where a
    split by class meets samples that have none."""
    config, split = FederatedConfig.of(recipe), SPLITS.read(FederatedConfig.of(recipe).split)
    classes = classes_of(corpus.train) if split.by_class else None
    if split.by_class and classes is None:
        raise UsageError(
            f"split={config.split} goes by the class of a sample; those of {recipe.data.source} have no class",
            where="federated.split, data.source",
            fix="split = iid, or pictures with labels",
            code="C06",
        )
    return list(split.assign(len(corpus.train), classes, config.clients, recipe.seed))


def classes_of(data: Dataset) -> np.ndarray | None:
    """The class of each sample, int64 [n]; None where a sample has more than one target."""
    blocks = (np.arange(at, min(at + _BLOCK, len(data))) for at in range(0, len(data), _BLOCK))
    classes: list[np.ndarray] = []
    for block in blocks:
        targets = data.fetch(block.astype(np.int64))[1]
        if targets.dim() != 1 or targets.is_floating_point():
            return None
        classes.append(targets.numpy())
    return np.concatenate(classes) if classes else None
