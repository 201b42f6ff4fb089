"""Weights in 8 bits that `transformers` loads by itself: `from_pretrained` makes torchao's tensors of them.

config.json says `quantization_config`. In model.safetensors a matrix LAYER.weight is `LAYER._weight_qdata`, int8
[outputs, inputs], `LAYER._weight_scale`, [outputs, 1], and what else torchao's tensor has; the file's own metadata say
of which class it is. Names and metadata are those that torchao itself gives a tensor without numbers.
"""

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.models.folder import Outgoing, open_folder, write_json, write_tensors
from unisono.spec.quiet import importing
from unisono_contrib.train.foreign.inert import MadeWeights

CONFIG = "config.json"
KEY = "quantization_config"  # in it
_NUMBERS, _SCALE = "qdata", "scale"  # what torchao calls them


def torchao_tensor(matrix: Tensor) -> Tensor:
    """The matrix [outputs, inputs] as `quantize_` with `Int8WeightOnlyConfig` makes it: one scale for each output."""
    with importing():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
    return layer.weight.data


def write_int8(folder: Path, matrices: Collection[str]) -> list[str]:
    """Write the folder's weights anew, these matrices in 8 bits, and say so in its config.json. Returns the files of
    weights. Raises OSError."""
    with importing():
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict as flattened
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

    whole = open_folder(folder)
    last: dict[str, Mapping[str, Tensor]] = {}

    def part(name: str, which: str) -> Tensor:
        if name not in last:
            last.clear()
            numbers = torchao_tensor(whole.whole(name).clone())
            last[name] = flattened({name: numbers})[0]  # type: ignore[arg-type]
        return last[name][which]

    entries: list[Outgoing] = []
    about: dict[str, str] = {}
    for name, shape in whole.shapes.items():
        first = whole.whole(name)
        empty = torch.empty(shape, dtype=first.dtype, device="meta")
        parts, said = flattened({name: torchao_tensor(empty) if name in matrices else empty})  # type: ignore[dict-item]
        about[name] = said[name]
        for which, x in parts.items():
            make = partial(part, name, which) if name in matrices else partial(torch.clone, first)
            entries.append(Outgoing(which, x.dtype, tuple(x.shape), make))
    about["tensor_names"] = json.dumps(list(whole.shapes))
    files = write_tensors(folder, entries, about=about)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    way = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False)).to_dict()
    write_json(folder / CONFIG, {**config, KEY: way})
    return files


class Int8Weights(MadeWeights):
    """The tensors of such a folder as whole ones, by the library's names. Raises UsageError W01."""

    def __init__(self, folder: Path) -> None:
        self._stored = open_folder(folder)
        held, numbers = self._stored.shapes, f"._weight_{_NUMBERS}"
        ends = tuple(f"._weight_{part}" for part in (_NUMBERS, _SCALE, "zero_point"))
        self.matrices = {
            f"{name.removesuffix(numbers)}.weight": shape
            for name, shape in held.items()
            if name.endswith(numbers)
        }
        plain = {
            name: (shape, partial(self._stored.whole, name))
            for name, shape in held.items()
            if not name.endswith(ends)
        }
        matrices = {name: (shape, partial(self._matrix, name)) for name, shape in self.matrices.items()}
        super().__init__(str(folder), {**plain, **matrices})

    def parts(self, name: str) -> tuple[Tensor, Tensor]:
        """(numbers int8 [outputs, inputs], scale [outputs, 1]) of a matrix."""
        layer = name.removesuffix(".weight")
        return (
            self._stored.whole(f"{layer}._weight_{_NUMBERS}"),
            self._stored.whole(f"{layer}._weight_{_SCALE}"),
        )

    def _matrix(self, name: str) -> Tensor:
        numbers, scale = self.parts(name)
        return numbers * scale


def said_in(folder: Path) -> Mapping[str, Any] | None:
    """What the folder's config.json says of quantisation."""
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get(KEY)
    except (OSError, ValueError, AttributeError):
        return None
