"""The recipe: its models, its files, its flags, and what follows from holding a plan against it. No torch here."""

from unisono.config.layers import split_flags
from unisono.config.load import Loaded, load
from unisono.config.models import DataConfig, LaunchConfig, ModelConfig, OutConfig, Recipe, TrainConfig
from unisono.config.resolve import Resolved, resolve
from unisono.config.write import as_json, differences, recipe_toml, resolved_toml, schema
from unisono.plan import Batch

__all__ = [
    "Batch",
    "DataConfig",
    "LaunchConfig",
    "Loaded",
    "ModelConfig",
    "OutConfig",
    "Recipe",
    "Resolved",
    "TrainConfig",
    "as_json",
    "differences",
    "load",
    "recipe_toml",
    "resolve",
    "resolved_toml",
    "schema",
    "split_flags",
]
