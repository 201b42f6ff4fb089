"""A few words from the trained model: to look at, not to measure."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unisono import config
from unisono.config import Recipe
from unisono.spec.errors import UsageError
from unisono.spec.training import IGNORED
from unisono.train.build.build import model_of
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load as load_data
from unisono.train.export import checkpoint_of
from unisono.train.state.checkpoint import read_full, tensor_names

LARGEST = 50_000_000  # parameters; more would make the end of a run wait


def from_run(
    run_dir: Path, checkpoint: Path | None, prompt: str, length: int, temperature: float, seed: int | None
) -> dict[str, Any]:
    """`unisono sample`: text from a run's checkpoint, the latest if None; the object of --json.

    Raises UsageError: F03 no checkpoint, F05 a model without text or a prompt that its tokenizer lacks, K01 damaged.
    """
    folder = checkpoint or checkpoint_of(run_dir)
    recipe, corpus, model = load_text_model(run_dir, folder)
    encode, decode = _codec(recipe, corpus, str(run_dir))
    try:
        tokens = list(encode(prompt)) if prompt else []
    except (KeyError, ValueError):
        unknown = next((c for c in prompt if not _encodes(encode, c)), prompt)
        raise UsageError(
            f"{unknown!r} does not occur in the data, so the {recipe.data.tokenizer} tokenizer has no token for it",
            where="--prompt",
            fix="a prompt of characters that the data has",
            code="F05",
        ) from None
    seed = recipe.seed if seed is None else seed
    drawn = _draw(model, recipe.model.window, tokens or _first(corpus), length, temperature, seed)
    return {
        "run_dir": str(run_dir),
        "checkpoint": str(folder),
        "prompt": prompt,
        "text": decode(drawn),
    }


def load_text_model(run_dir: Path, checkpoint: Path) -> tuple[Recipe, Corpus, nn.Module]:
    """A run's recipe, its data and its whole model with a checkpoint's weights. Raises UsageError: F05 a model without
    text, K01 damaged."""
    recipe, corpus, model = load_model(run_dir, checkpoint)
    _codec(recipe, corpus, str(run_dir))
    return recipe, corpus, model


def load_model(run_dir: Path, checkpoint: Path) -> tuple[Recipe, Corpus, nn.Module]:
    """A run's recipe, its data and its whole model with a checkpoint's weights. Raises UsageError K01: damaged."""
    recipe = config.load(run_dir).recipe
    corpus = load_data(recipe.data, recipe.model)
    model = model_of(recipe, corpus)
    _load(model, checkpoint)
    return recipe, corpus, model


def _codec(
    recipe: Recipe, corpus: Corpus, where: str
) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """Text to tokens, and back. Raises UsageError F05 where there is no text."""
    if recipe.model.reads != "tokens" or corpus.decode is None or corpus.encode is None:
        what = f"a model of kind {recipe.model.kind} on {recipe.data.source} makes no text"
        raise UsageError(what, where=where, fix="a run on text, with a tokenizer of ours", code="F05")
    return corpus.encode, corpus.decode


def sample(
    folder: Path,
    recipe: Recipe,
    corpus: Corpus,
    start: str = "def ",
    length: int = 200,
    device: torch.device | str = "cpu",
) -> str | None:
    """The text that ends a run, computed on `device`; None for models without text or too large to wait for."""
    if recipe.model.reads != "tokens" or corpus.decode is None or corpus.encode is None:
        return None
    model = model_of(recipe, corpus)
    if sum(p.numel() for p in model.parameters()) > LARGEST:  # before its weights are read
        return None
    _load(model, folder)
    model.to(device)
    if (question := _question(corpus)) is not None:
        tokens, end = question
    else:
        tokens, end = list(corpus.encode(start)) if _encodes(corpus.encode, start) else _first(corpus), None
    return corpus.decode(_draw(model, recipe.model.window, tokens, length, 0.8, recipe.seed, end))


def _encodes(encode: Callable[[str], Sequence[int]], text: str) -> bool:
    try:
        encode(text)
    except (KeyError, ValueError):
        return False
    return True


def _first(corpus: Corpus) -> list[int]:
    """The first tokens of the data, to begin with."""
    return corpus.train.fetch(np.zeros(1, dtype=np.int64))[0][0, :4].tolist()


def _question(corpus: Corpus) -> tuple[list[int], int] | None:
    """(what stands before the first answer that is held out, the token that ends that answer), where answers count
    and nothing else does."""
    held = corpus.val if corpus.val is not None and len(corpus.val) else corpus.train
    inputs, targets = (each[0].tolist() for each in held.fetch(np.zeros(1, dtype=np.int64)))
    counts = [target != IGNORED for target in targets]
    if counts[0] or True not in counts:
        return None
    first = counts.index(True)
    after = counts.index(False, first) if False in counts[first:] else len(counts)
    return inputs[: first + 1], targets[after - 1]


def _load(model: nn.Module, folder: Path) -> None:
    """Gives the whole model the weights of a checkpoint."""
    names = [name for name in tensor_names(folder) if name.startswith("model/")]
    state = {name.removeprefix("model/"): t for name, t in read_full(folder, names).items()}
    model.load_state_dict(state, strict=False, assign=True)
    for alias, owner in model.anatomy.ties:  # type: ignore[union-attr]
        module, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))
    model.eval()


@torch.no_grad()
def _draw(
    model: nn.Module,
    window: int,
    tokens: list[int],
    length: int,
    temperature: float,
    seed: int,
    end: int | None = None,
) -> list[int]:
    """`tokens`, and `length` more drawn from softmax(logits / temperature); the likeliest ones where it is 0. Fewer if
    `end` is drawn."""
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    for _ in range(length):
        logits = model(torch.tensor([tokens[-window:]], device=device))[0, -1].float().cpu()
        chances = (logits / temperature).softmax(-1) if temperature else (logits == logits.max()).float()
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        if tokens[-1] == end:
            break
    return tokens
