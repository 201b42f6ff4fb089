"""A few words from the trained model: to look at, not to measure."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from unisono.config import Recipe
from unisono.models.build import build as build_model
from unisono.train.build import facts_of
from unisono.train.checkpoint import read_full
from unisono.train.data.dataset import Corpus

LARGEST = 50_000_000  # parameters; more would make the end of a run wait


@torch.no_grad()
def sample(
    folder: Path, recipe: Recipe, corpus: Corpus, start: str = "def ", length: int = 200
) -> str | None:
    """Text drawn from the weights in a checkpoint, by one process; None for models without text or too large.

    Draws from softmax(logits / 0.8) with a generator seeded by the recipe.
    """
    encode: Callable[[str], Sequence[int]] | None = corpus.encode
    if recipe.model.reads != "tokens" or corpus.decode is None or encode is None:
        return None
    model = build_model(recipe.model, facts_of(corpus))
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        return None
    state = {
        name.removeprefix("model/"): t for name, t in read_full(folder).items() if name.startswith("model/")
    }
    model.load_state_dict(state, strict=False, assign=True)
    for alias, owner in model.anatomy.ties:  # type: ignore[union-attr]
        module, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))
    try:
        tokens = list(encode(start))
    except (KeyError, ValueError):
        tokens = list(corpus.train.fetch(np.zeros(1, dtype=np.int64))[0][0, :4].tolist())
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(length):
        logits = model(torch.tensor([tokens[-recipe.model.window :]]))[0, -1].float()
        tokens.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)))
    return corpus.decode(tokens)
