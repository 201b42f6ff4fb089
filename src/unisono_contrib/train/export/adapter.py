"""Adapters as `peft` keeps them: adapter_config.json and adapter_model.safetensors.

A layer of theirs that is made of several of ours (queries, keys and values in one) gets an adapter of their ranks
together: the first matrices stacked, the second ones side by side, each over its own rows.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.config import ModelConfig
from unisono.models.build import build as build_model
from unisono.models.folder import Outgoing, write_json, write_tensors
from unisono.models.hf.names import Layout, NamedPart
from unisono.models.lora import pair_of
from unisono.models.weights import shapes_there
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts
from unisono.train.export.stored import StoredWeights

_SINGLE = "adapter_model.safetensors"
Made = dict[str, list[NamedPart]]  # layer of ours → its parts in one of theirs


def write_adapter(out: Path, config: ModelConfig, weights: StoredWeights) -> dict[str, Any]:
    """Returns files, layers, rank. Raises UsageError F01, F06; OSError."""
    if not weights.adapters:
        raise UsageError(
            "this run has no adapters",
            code="F06",
            where="--to adapter",
            fix="--to hf for its weights; train.lora_rank trains adapters",
        )
    layout = layout_for(config, weights)
    parts, there = _made_of(layout, weights), shapes_there(layout)
    rank = min(min(shape) for shape in weights.adapters.values())
    entries: list[Outgoing] = []
    ranks: dict[str, int] = {}
    turned = False
    for module, layers in sorted(parts.items()):
        shape = there[f"{module}.weight"]
        if (table := _table(weights, list(layers))) is not None:
            entries += _of_table(weights, table, f"base_model.model.{module}")
            continue
        turned = turned or next(iter(layers.values()))[0].turned
        outputs, inputs = shape[::-1] if next(iter(layers.values()))[0].turned else shape
        if len(layers) > 1:
            ranks[module] = rank * len(layers)
        width, name = rank * len(layers), f"base_model.model.{module}"
        dtype = weights.dtype or torch.float32
        second = partial(_second, weights, layers, outputs, rank)
        entries += [
            Outgoing(f"{name}.lora_A.weight", dtype, (width, inputs), partial(_first, weights, list(layers))),
            Outgoing(f"{name}.lora_B.weight", dtype, (outputs, width), second),
        ]
    files = write_tensors(out, entries, limit=1 << 62, single=_SINGLE)
    write_json(
        out / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if config.reads == "tokens" else None,
            "base_model_name_or_path": config.begins_from(),
            "inference_mode": True,
            "r": rank,
            "lora_alpha": weights.scale * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": turned,
            "target_modules": sorted(parts),
            "rank_pattern": ranks,
            "alpha_pattern": {module: weights.scale * width for module, width in ranks.items()},
        },
    )
    return {"files": sorted([*files, "adapter_config.json"]), "layers": len(parts), "rank": rank}


def layout_for(config: ModelConfig, weights: StoredWeights) -> Layout:
    """How the library that will load them lays the weights out in its modules. Raises UsageError F01."""
    name = config.layout()
    if (layout := config.layouts(weights.shapes).get(name)) is not None:
        return layout
    return build_model(config, Facts()).names.modules  # type: ignore[union-attr,return-value]


def _made_of(layout: Layout, weights: StoredWeights) -> dict[str, Made]:
    """Our layers with adapters, by the module of theirs that they make up."""
    parts_of: dict[str, Made] = defaultdict(dict)
    for name in weights.adapters:
        layer, _, _ = name.rpartition(".lora_")
        for part in layout[f"{layer}.weight"]:
            parts = parts_of[part.name.removesuffix(".weight")].setdefault(layer, [])
            if part not in parts:
                parts.append(part)
    return parts_of


def _table(weights: StoredWeights, layers: list[str]) -> tuple[str, str] | None:
    """Names of the adapter beside a table of words; None of other layers."""
    (layer, *_) = layers
    _, both = pair_of(layer)
    return both if both[0] in weights.adapters else None


def _of_table(weights: StoredWeights, both: tuple[str, str], name: str) -> list[Outgoing]:
    """The narrow table as [rank, words], the way back as [width, rank]; parameters of their layer itself."""
    rows, back = both
    words, rank = weights.adapters[rows]
    dtype = weights.dtype or torch.float32
    return [
        Outgoing(f"{name}.lora_embedding_A", dtype, (rank, words), lambda: weights.raw(rows).T),
        Outgoing(f"{name}.lora_embedding_B", dtype, weights.adapters[back], lambda: weights.raw(back)),
    ]


def _first(weights: StoredWeights, layers: list[str]) -> Tensor:
    return torch.cat([weights.raw(f"{layer}.lora_A.weight") for layer in layers])


def _second(weights: StoredWeights, layers: Made, outputs: int, rank: int) -> Tensor:
    blocks = []
    for layer, parts in layers.items():
        b = weights.raw(f"{layer}.lora_B.weight")
        block = b.new_zeros(outputs, rank)
        for part in parts:
            row, size = part.at[-1] if part.turned else part.at[0], part.size[0]
            block[row : row + size] = b[part.start[0] : part.start[0] + size]
        blocks.append(block)
    return torch.cat(blocks, dim=1)
