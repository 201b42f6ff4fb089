"""Megatron-LM's checkpoints, `mp_rank_TT/` or `mp_rank_TT_PPP/`, put together over tensor and pipeline ranks.

Names are those of Megatron-Core; older ones, and those of fused layers, are given these.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.models.folder import unreadable
from unisono.models.weights import Shape, Weights
from unisono.spec.words import whole
from unisono_contrib.train.foreign.inert import Inert, MadeWeights, saved, tensors_in

_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?$")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_NEWER = (
    ("language_model.embedding.", "embedding."),
    ("language_model.encoder.final_norm.", "decoder.final_layernorm."),
    ("language_model.encoder.", "decoder."),
    ("language_model.output_layer.", "output_layer."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
    (".input_norm.", ".input_layernorm."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
_ROWS = (
    "word_embeddings.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "output_layer.weight",
)
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def _iteration(folder: Path) -> Path:
    """The folder of one iteration: what the tracker names, or itself."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    try:
        word = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
    except (OSError, UnicodeDecodeError):
        word = ""
    named = folder / (word if (step := whole(word)) is None else f"iter_{step:07d}")
    return named if word and named.is_dir() else folder


def _files(folder: Path) -> dict[tuple[int, int], Path]:
    """(stage, tensor rank) → its file."""
    files: dict[tuple[int, int], Path] = {}
    inside = _iteration(folder)
    for path in sorted(inside.glob("mp_rank_*/model*_rng.pt")):
        if (match := _RANK.match(path.parent.name)) is not None:
            files[int(match[2] or 0), int(match[1])] = path
    return files


def is_megatron(folder: Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return bool(_files(folder))


def open_megatron(folder: Path) -> Weights:
    """The whole model's weights. Raises UsageError W01, W05."""
    files = _files(folder)
    stages, ranks = 1 + max(stage for stage, _ in files), 1 + max(rank for _, rank in files)
    if len(files) != stages * ranks:
        raise unreadable(
            folder, ValueError(f"of {stages} x {ranks} parts {stages * ranks - len(files)} are missing")
        )
    make: dict[str, tuple[Shape, Callable[[], Tensor]]] = {}
    layers = 0
    for stage in range(stages):
        trees = [saved(files[stage, rank]) for rank in range(ranks)]
        parts = [_named(tree, files[stage, 0], layers) for tree in trees]
        gated = bool(_args(trees[0]).get("swiglu"))
        for name in parts[0]:
            pieces = [part[name] for part in parts]
            # The last stage of tied embeddings has a copy of the first one's.
            make.setdefault(name, (_shape(name, pieces), partial(_whole, name, pieces, gated)))
        numbers = {int(match[1]) for name in parts[0] if (match := _LAYER.match(name))}
        layers = max(numbers, default=layers - 1) + 1
    return MadeWeights(str(_iteration(folder)), make)


def _args(tree: Any) -> Mapping[str, Any]:
    """Megatron's own settings, as far as they were written."""
    args = tree.get("args") if isinstance(tree, Mapping) else None
    return args.state if isinstance(args, Inert) and isinstance(args.state, Mapping) else {}


def _named(tree: Any, path: Path, before: int) -> dict[str, Tensor]:
    """The weights of one part by newer names. before: layers of the stages before it."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("model"), Mapping):
        raise unreadable(path, ValueError("it holds no `model`; parts of interleaved stages are not read"))
    named = {}
    for name, tensor in tensors_in(tree["model"]).items():
        for old, new in _NEWER:
            name = name.replace(old, new)
        name = _LAYER.sub(lambda match: f"decoder.layers.{before + int(match[1])}.", name)
        if not name.endswith("_extra_state"):
            named[name] = tensor
    return named


def _dim(name: str) -> int | None:
    """In which dim tensor ranks have dealt a weight; None: all have it."""
    return 0 if name.endswith(_ROWS) else 1 if name.endswith(_COLUMNS) else None


def _shape(name: str, pieces: list[Tensor]) -> Shape:
    shape, dim = list(pieces[0].shape), _dim(name)
    if dim is not None:
        shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return tuple(shape)


def _whole(name: str, pieces: list[Tensor], gated: bool) -> Tensor:
    """gated: each rank's part of the first feed-forward layer is some of the gate and some of the other."""
    dim = _dim(name)
    if dim is None or len(pieces) == 1:
        return pieces[0]
    if gated and "linear_fc1." in name:
        halves = [piece.chunk(2) for piece in pieces]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(pieces, dim)
