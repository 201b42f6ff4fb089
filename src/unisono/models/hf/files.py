"""Weights as `save_pretrained` writes them, where that is not as modules hold them: experts lie one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from unisono.models.hf.names import Layout, NamedPart

_EXPERTS: Mapping[str, tuple[str, str, tuple[str, str, str]]] = {
    "mixtral": (".mlp.", ".block_sparse_moe.", ("w1", "w3", "w2")),
    "qwen2_moe": (".mlp.", ".mlp.", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe": (".mlp.", ".mlp.", ("gate_proj", "up_proj", "down_proj")),
}
"""Of a family: the part of a name that differs, as modules and as files have it; an expert's gate, up, down."""


def layout_of_files(modules: Layout, family: str) -> Layout:
    """Of a model of this family, as its files have it."""
    if family not in _EXPERTS:
        return dict(modules)
    return {
        name: tuple(part for one in parts for part in _filed(one, family)) for name, parts in modules.items()
    }


def _filed(part: NamedPart, family: str) -> Iterator[NamedPart]:
    here, there, (gate, up, down) = _EXPERTS[family]
    name = part.name.replace(here, there)
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("gate_up_proj", "down_proj"):
        yield replace(part, name=name)
        return
    each = down if leaf == "down_proj" else up if part.at[1] else gate
    for e in range(part.size[0]):
        yield NamedPart(f"{stem}.{e}.{each}.weight", (e, 0, 0), (1, *part.size[1:]), (0, 0))
