"""What a server and the processes of its clients must have alike, in few bytes."""

import json
from hashlib import blake2b
from typing import Any

import torch

from unisono import __version__
from unisono.config import Recipe
from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated.server import RunParts
from unisono_contrib.spec.federated import SPLITS

_ROOM = 1 << 20
"""Bytes of a message beside its vectors."""


def alike(recipe: Recipe, parts: RunParts, fingerprint: str) -> dict[str, str]:
    """By what people call it: versions as they are, all else as 16 hex digits. The data counts where all have the same,
    of which each client has a part."""
    said = recipe.model_dump(mode="json")
    facts = {"unisono": __version__, "torch": torch.__version__}
    facts |= {key: _digest(said[key]) for key in ("seed", "model", "train", "federated")}
    if (
        privacy := said.get("privacy")
    ) is not None:  # clients clip by it; the key of the noise is the server's
        facts["privacy"] = _digest({**privacy, "key": None})
    facts["parameters"] = _digest([[slot.name, list(slot.shape)] for slot in parts.trainer.slots])
    return facts if SPLITS.read(FederatedConfig.of(recipe).split).apart else {**facts, "data": fingerprint}


def most_bytes(parts: RunParts) -> int:
    """Bytes that a message may have at most: the weights and some vectors like them."""
    weights = parts.trainer.weights()
    return _ROOM + 4 * max(8, weights.element_size()) * weights.numel()


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
