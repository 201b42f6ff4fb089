"""The recipe: its models, its files, its flags. Nothing here imports torch."""

from unisono.config.models import DataConfig, LaunchConfig, ModelConfig, OutConfig, Recipe, TrainConfig

__all__ = ["DataConfig", "LaunchConfig", "ModelConfig", "OutConfig", "Recipe", "TrainConfig"]
