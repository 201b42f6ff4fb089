"""What is measured: the usual work of `train`, by a few sizes. No torch."""

from collections.abc import Mapping

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig


def gpt(sizes: Mapping[str, int], batch: int, micro_batch: int | None = None, dropout: float = 0.0) -> Recipe:
    """A GPT with AdamW and clipping. sizes: n_layer n_head d_model context vocab."""
    return Recipe(
        name="measured",
        model=ModelConfig(**sizes, dropout=dropout),  # type: ignore[arg-type]
        data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(
            steps=1_000_000, global_batch=batch, micro_batch=micro_batch, lr=1e-4, warmup_steps=10, clip=1.0
        ),
    )
