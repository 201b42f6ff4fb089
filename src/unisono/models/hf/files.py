"""Weights as `save_pretrained` writes them, where that is not as modules hold them: some have other names, and experts
lie one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from unisono.models.hf.names import Layout, NamedPart
from unisono.models.weights import shapes_there

_EXPERTS: Mapping[str, tuple[str, str, tuple[str, str, str]]] = {
    "mixtral": (".mlp.", ".block_sparse_moe.", ("w1", "w3", "w2")),
    "qwen2_moe": (".mlp.", ".mlp.", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe": (".mlp.", ".mlp.", ("gate_proj", "up_proj", "down_proj")),
}
"""Of a family: the part of an expert's name that differs, as modules and as files have it; its gate, up, down."""


def layout_of_files(modules: Layout, model: Any) -> Layout:
    """Of the library's model, whose weights lie in its modules like this, as its files have it."""
    family, saved = model.config.model_type, saved_names(modules, model)
    return {
        name: tuple(part for source in parts for part in _filed(source, family, saved))
        for name, parts in modules.items()
    }


def saved_names(modules: Layout, model: Any) -> dict[str, str]:
    """Names of modules → those that this version of the library writes, of whatever is renamed and else as it was."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5.0 files were as modules
        return {}
    held = {name: torch.empty(shape, device="meta") for name, shape in shapes_there(modules).items()}
    written = {id(tensor): name for name, tensor in revert_weight_conversion(model, held).items()}
    return {name: written[id(tensor)] for name, tensor in held.items() if id(tensor) in written}


def _filed(part: NamedPart, family: str, saved: Mapping[str, str]) -> Iterator[NamedPart]:
    stem, _, leaf = part.name.rpartition(".")
    if family not in _EXPERTS or leaf not in ("gate_up_proj", "down_proj"):
        yield replace(part, name=saved.get(part.name, part.name))
        return
    here, there, (gate, up, down) = _EXPERTS[family]
    stem, each = stem.replace(here, there), down if leaf == "down_proj" else up if part.at[1] else gate
    for e in range(part.size[0]):
        yield NamedPart(f"{stem}.{e}.{each}.weight", (e, 0, 0), (1, *part.size[1:]), (0, 0))
