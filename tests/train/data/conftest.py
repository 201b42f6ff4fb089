"""Recipes' parts for the tests of data."""

from collections.abc import Callable
from typing import Any

import pytest

from unisono.config import DataConfig, ModelConfig
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load


@pytest.fixture
def open_source() -> Callable[..., Corpus]:
    """load() of a source, with the model's fields as keywords."""

    def opened(source: str, *, tokenizer: str = "byte", val_fraction: float = 0.1, **model: Any) -> Corpus:
        fields: dict[str, Any] = model if "kind" in model else {"context": 8} | model
        return load(
            DataConfig(source=source, tokenizer=tokenizer, val_fraction=val_fraction), ModelConfig(**fields)
        )

    return opened
