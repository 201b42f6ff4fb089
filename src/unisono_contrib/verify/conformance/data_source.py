"""What every data source owes: samples as it declares them, and the same ones each time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from unisono.config import DataConfig
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.source import DataSource
from unisono.train.data.load import load


def faults(member: DataSource, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a source, a sentence each: what it knows without reading is so, loaded twice it is the same
    data under the same fingerprint, and its samples have the shape that it says."""
    known = member.facts("byte")
    vocab = {} if known.vocab or member.gives != "tokens" else {"vocab": 1 << 16}
    model = ModelConfig(kind="any.py:model", context=8, **vocab)
    first, two = (load(DataConfig(source=text or member.name), model) for _ in range(2))
    facts = Facts(first.vocab, first.classes, first.sample_shape)
    for key in ("vocab", "classes", "sample_shape"):
        if getattr(known, key) not in (None, getattr(facts, key)):
            yield f"it declares {key} {getattr(known, key)} and has {getattr(facts, key)}"
    if first.fingerprint != two.fingerprint or len(first.train) != len(two.train):
        yield "loaded again, it is other data"
    indices = np.arange(min(4, len(first.train)))
    inputs, targets = first.train.fetch(indices)
    if inputs.shape[1:] != tuple(first.sample_shape):
        yield f"its samples have the shape {tuple(inputs.shape[1:])} and it says {tuple(first.sample_shape)}"
    if not (
        torch.equal(inputs, two.train.fetch(indices)[0]) and torch.equal(targets, two.train.fetch(indices)[1])
    ):
        yield "loaded again, its samples are others"
    if member.gives == "tokens" and inputs.is_floating_point():
        yield "it says that it gives tokens, and they are no whole numbers"
