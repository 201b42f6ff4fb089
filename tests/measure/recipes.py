"""What is measured: the usual work of `train`, by a few sizes. No torch."""

from collections.abc import Mapping
from typing import Any

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.spec.model import restored


def sized(
    sizes: Mapping[str, Any], batch: int, micro_batch: int | None = None, dropout: float = 0.0
) -> Recipe:
    """A model of these sizes; of a GPT they are n_layer n_head d_model context vocab."""
    return of(restored({**sizes, "dropout": dropout}), batch, micro_batch)


def of(model: ModelConfig, batch: int, micro_batch: int | None = None) -> Recipe:
    """Any model with AdamW and clipping."""
    return Recipe(
        name="measured",
        model=model,
        data=DataConfig(source="digits")
        if model.reads == "pictures"
        else DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(
            steps=1_000_000, global_batch=batch, micro_batch=micro_batch, lr=1e-4, warmup_steps=10, clip=1.0
        ),
    )
