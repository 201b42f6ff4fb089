"""Weights in 8 or 4 bits on a disk, and back.

In 8 bits they lie as `transformers` loads them (`int8.py`). What it does not load lies in a form of ours: 4 bits, which
it computes on GPUs alone, and matrices kept as [inputs, outputs], such as GPT-2's.

`quantised.safetensors` holds, of a matrix NAME of the library's, `NAME.numbers` and `NAME.scale`; all others as they
were. numbers: int8 [outputs, inputs], or uint8 [outputs, inputs / 2], where a byte holds the numbers + 8 of two inputs,
the first one low. scale [outputs, groups]: by what the numbers of so many inputs are multiplied. `quantised.json` says
the bits, and which matrices the library keeps as [inputs, outputs]; here outputs come first.

Such a folder has no model.safetensors, so nobody takes it for a whole one.
"""

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.models.folder import (
    INDEX,
    Outgoing,
    SafetensorsWeights,
    open_folder,
    unreadable,
    write_json,
    write_tensors,
)
from unisono.models.hf.names import Layout
from unisono.models.weights import Weights, shapes_there, sources_of
from unisono.spec.quiet import importing
from unisono_contrib.train.export.int8 import Int8Weights, said_in, write_int8
from unisono_contrib.train.foreign.inert import MadeWeights

BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
WEIGHTS, ABOUT = "quantised.safetensors", "quantised.json"
_GROUP = 32  # inputs that share a scale at 4 bits


def _torchao_numbers(matrix: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(int8 [outputs, inputs], scale [outputs, groups]) as `torchao.quantization.quantize_` makes them."""
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    numbers = quantised_layer(layer, bits).weight
    if bool(getattr(numbers, "zero_point", torch.zeros(1)).any()):
        raise ValueError("torchao's zero points are not zero, and this form has none")
    return numbers.qdata, numbers.scale.view(matrix.shape[0], -1).to(matrix.dtype)  # type: ignore[union-attr,operator]


def quantised_layer(layer: nn.Linear, bits: int) -> nn.Linear:
    """The layer, whose weight has become a tensor of torchao's."""
    with importing():
        from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

    by = PerGroup(_GROUP) if bits == 4 and layer.in_features % _GROUP == 0 else PerAxis(0)
    quantize_(layer, IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=by))
    return layer


def packed(numbers: Tensor) -> Tensor:
    """Numbers of 4 bits, int8 [outputs, inputs] → uint8 [outputs, inputs / 2], rounded up."""
    even = nn.functional.pad(numbers, (0, numbers.shape[1] % 2)) + 8
    low, high = even.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4)


def unpacked(two: Tensor, inputs: int) -> Tensor:
    """The way back of `packed`."""
    both = torch.stack((two & 15, two >> 4), dim=2).flatten(1)[:, :inputs]
    return both.to(torch.int8) - 8


def quantise_folder(folder: Path, layout: Layout, kind: str, modules: Collection[str]) -> dict[str, Any]:
    """Write the folder's weights anew with the matrices of its blocks in 8 or 4 bits, and remove the old files.

    modules: names of weights in the library's modules. What has another name in its files stays whole: it is made of
    several there, as Mixtral's experts, or is no plain layer, as its routers. Returns quantised: how many matrices,
    group: inputs with one scale at 4 bits, files. Raises OSError.
    """
    whole, there, bits = open_folder(folder), shapes_there(layout), BITS[kind]
    old = [*folder.glob("model*.safetensors"), *folder.glob(INDEX)]
    chosen: dict[str, bool] = {}  # their matrices → whether they are kept as [inputs, outputs]
    for theirs, made_of in sources_of(layout).items():
        if (
            theirs in modules
            and len(there[theirs]) == 2
            and all(ours.startswith("blocks.") for ours, _ in made_of)
        ):
            chosen[theirs] = made_of[0][1].turned
    if bits == 8 and not any(chosen.values()):
        files = write_int8(folder, chosen.keys())
        for file in old:
            if file.name not in files:
                file.unlink()
        return {"quantised": len(chosen), "group": None, "files": files}
    last: dict[str, tuple[Tensor, Tensor]] = {}

    def matrix(name: str) -> Tensor:
        return (whole.whole(name).T if chosen[name] else whole.whole(name)).contiguous()

    def numbers(name: str, part: int) -> Tensor:
        if name not in last:
            last.clear()
            last[name] = _torchao_numbers(matrix(name), bits)
        part_numbers = last[name][part]
        return packed(part_numbers) if part == 0 and bits == 4 else part_numbers

    entries: list[Outgoing] = []
    for name, shape in whole.shapes.items():
        if name not in chosen:
            first = whole.whole(name)
            entries.append(Outgoing(name, first.dtype, shape, partial(torch.clone, first)))
            continue
        outputs, inputs = shape[::-1] if chosen[name] else shape
        groups = inputs // _GROUP if bits == 4 and inputs % _GROUP == 0 else 1
        dtype = whole.box(name, (0, 0), (1, 1)).dtype
        width = (inputs + 1) // 2 if bits == 4 else inputs
        held = torch.uint8 if bits == 4 else torch.int8
        entries += [
            Outgoing(f"{name}.numbers", held, (outputs, width), partial(numbers, name, 0)),
            Outgoing(f"{name}.scale", dtype, (outputs, groups), partial(numbers, name, 1)),
        ]
    write_tensors(folder, entries, limit=1 << 62, single=WEIGHTS)
    about = {"bits": bits, "matrices": {name: list(whole.shapes[name]) for name in chosen},
             "turned": sorted(name for name, turned in chosen.items() if turned)}  # fmt: skip
    write_json(folder / ABOUT, about)
    for file in old:
        file.unlink()
    return {"quantised": len(chosen), "group": _GROUP if bits == 4 else None, "files": [ABOUT, WEIGHTS]}


class QuantisedWeights(MadeWeights):
    """The folder's tensors as whole ones, by the library's names. Raises UsageError W01."""

    def __init__(self, folder: Path) -> None:
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            self.bits, self._turned = int(about["bits"]), set(about["turned"])
            self.matrices = {name: tuple(map(int, shape)) for name, shape in about["matrices"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(folder / ABOUT, error) from error
        self.stored = SafetensorsWeights([folder / WEIGHTS], str(folder))
        plain = {
            name: (shape, partial(self.stored.whole, name))
            for name, shape in self.stored.shapes.items()
            if not name.endswith((".numbers", ".scale"))
        }
        matrices = {name: (shape, partial(self._matrix, name)) for name, shape in self.matrices.items()}
        super().__init__(str(folder), {**plain, **matrices})

    def parts(self, name: str) -> tuple[Tensor, Tensor]:
        """(numbers int8 [outputs, inputs], scale [outputs, groups]) of a matrix."""
        held, scale = (self.stored.whole(f"{name}.{part}") for part in ("numbers", "scale"))
        shape = self.shapes[name]
        inputs = shape[0] if name in self._turned else shape[1]
        return (unpacked(held, inputs) if self.bits == 4 else held), scale

    def _matrix(self, name: str) -> Tensor:
        numbers, scale = self.parts(name)
        whole = numbers.to(scale.dtype) * scale.repeat_interleave(numbers.shape[1] // scale.shape[1], 1)
        return whole.T if name in self._turned else whole


def quantised_weights(folder: Path) -> Weights:
    """The folder's tensors as whole ones, whichever form it has. Raises UsageError W01."""
    return Int8Weights(folder) if said_in(folder) else QuantisedWeights(folder)


def load_quantised(folder: str | Path) -> nn.Module:
    """The folder's model of `transformers`, in evaluation mode: linear layers compute with torchao's tensors of these
    numbers. What the library keeps as [inputs, outputs] or renames computes with whole ones. Raises UsageError W01."""
    if said_in(Path(folder)):
        with importing():
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_pretrained(folder)
    weights = QuantisedWeights(Path(folder))
    dtype = weights.stored.whole(next(n for n in weights.stored.shapes if n.endswith(".scale"))).dtype
    state = {name: weights.whole(name) for name in weights.shapes}
    with importing():
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        kind: Any = AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[index]
        model, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    if odd := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise unreadable(Path(folder), ValueError(f"tensors do not fit: {odd[:3]}"))
    layers = dict(model.named_modules())
    for name in weights.matrices:
        layer = layers.get(name.removesuffix(".weight"))
        if isinstance(layer, nn.Linear):
            numbers, scale = weights.parts(name)
            # Of numbers times scale: the same numbers again.
            quantised = quantised_layer(layer, weights.bits).weight
            quantised.qdata.copy_(numbers)  # type: ignore[union-attr,operator]
            quantised.scale.copy_(scale.view(quantised.scale.shape))  # type: ignore[union-attr,operator]
    return model.eval()
