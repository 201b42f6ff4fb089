"""A run that goes on from what a loop of another program saved: `train.continue_from`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from unisono.config import ModelConfig, Recipe
from unisono.train.build.build import model_of
from unisono.train.build.pretrained import folded_as, layout_of, prefix_of
from unisono.train.data.dataset import Corpus
from unisono.train.foreign.trained import TrainedSource, TrainedState, open_state
from unisono.train.state.run_state import refill
from unisono.train.step.run import Run


def go_on(run: Run, recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Fill a run that is at its beginning, its step too, where the recipe names a checkpoint of another program.
    Nothing is read of it but numbers and names. Raises UsageError: W01 to W05 where it cannot be read or does not fit,
    K07 where it lacks optimiser state."""
    if recipe.train.continue_from is not None:
        state = open_state(Path(recipe.train.continue_from))
        refill(run, source_of(recipe.model, model_of(recipe, corpus), state))
    return {}


def source_of(config: ModelConfig, model: nn.Module, state: TrainedState) -> TrainedSource:
    """What another program saved, as a source for a run of `model`. Raises UsageError W02 to W04."""
    layout = layout_of(config, model, state.weights)
    prefix, held = prefix_of(model, layout), getattr(model, "cut_names", {})
    beside = {name: prefix + name.removeprefix("stem.module.") for name, _ in model.named_buffers()}
    beside |= {name: prefix + alias.name for name, alias in held.items() if name not in layout}
    moments = {key: folded_as(model, layout, kept) for key, kept in state.moments.items()}
    state = replace(state, weights=folded_as(model, layout, state.weights), moments=moments)
    there = {name: theirs for name, theirs in beside.items() if theirs in state.weights.shapes}
    return TrainedSource(state, layout, there)
