"""A compressed folder computes what its files say, in what loads it, and says truly what it lost."""

import json
from pathlib import Path

import pytest
import torch

from tests.train.export.test_targets import KINDS, tokens, trained
from unisono.config import Recipe
from unisono.spec.errors import UsageError
from unisono.train.export import run
from unisono.train.state.checkpoint import Box, latest, load, read_full, save
from unisono_contrib.train.export.compress import pruned
from unisono_contrib.train.export.int8 import Int8Weights
from unisono_contrib.train.export.quantised import (
    QuantisedWeights,
    load_quantised,
    packed,
    quantised_weights,
    unpacked,
)


def a_run(folder: Path, kind: str) -> Path:
    """A run with validation data of its own."""
    trained(folder / "first", KINDS[kind])
    words = folder / "words.txt"
    words.write_text("".join(chr(33 + i * i % 61) for i in range(4000)))
    there = latest(folder / "first")
    assert there is not None
    state = load(there, [])
    recipe = Recipe.model_validate_json(json.dumps(state["recipe"])).model_dump(mode="json")
    recipe["data"] |= {"source": f"text:{words}", "tokenizer": "char"}
    recipe["train"] |= {"global_batch": 4, "micro_batch": 2, "eval_batches": 2}
    whole = read_full(there, None)
    pieces = [Box(n, tuple(x.shape), (0,) * x.dim(), x) for n, x in whole.items()]
    save(folder / "run", 7, pieces, {**state, "recipe": recipe})
    return folder / "run"


def test_the_least_go() -> None:
    matrix = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    half = pruned(matrix, 0.25)
    gone = half == 0
    assert gone.sum() == 12 and torch.equal(half[~gone], matrix[~gone])
    assert matrix[gone].abs().max() < matrix[~gone].abs().min()
    fours = pruned(matrix, None).view(-1, 4)
    assert ((fours == 0).sum(1) == 2).all()
    for kept, whole in zip(fours, matrix.view(-1, 4), strict=True):
        assert set(kept[kept != 0].tolist()) == set(sorted(whole.tolist(), key=abs)[2:])
    with pytest.raises(UsageError, match="fours"):
        pruned(matrix[:, :6], None)


def test_two_to_a_byte() -> None:
    numbers = torch.randint(-8, 8, (5, 7), dtype=torch.int8)
    two = packed(numbers)
    assert two.dtype == torch.uint8 and two.shape == (5, 4)
    assert torch.equal(unpacked(two, 7), numbers)


@pytest.mark.parametrize("prune", [pytest.param("0.5", marks=pytest.mark.slow), "2:4"])
def test_a_pruned_folder(prune: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = run(a_run(tmp_path, "llama"), out=tmp_path / "out", prune=prune)["compressed"]
    assert made["zeros"] == 0.5 and made["loss"]["after"] > 0
    assert made["loss"]["after"] != made["loss"]["before"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weight = theirs.model.layers[1].mlp.down_proj.weight
    assert (weight == 0).float().mean() == 0.5
    if prune == "2:4":
        assert ((weight.reshape(-1, 4) == 0).sum(1) == 2).all()


@pytest.mark.parametrize(
    "bits,kind",
    [
        (4, "llama"),
        *(pytest.param(b, k, marks=pytest.mark.slow) for b, k in [(8, "llama"), (8, "gpt2"), (4, "gpt2")]),
    ],
)
def test_a_quantised_folder(bits: int, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    folder = a_run(tmp_path, kind)
    run(folder, out=tmp_path / "whole")
    made = run(folder, out=tmp_path / "out", quantise=f"int{bits}")
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {*made["files"]} and len(files) == len(made["files"])
    ready = (bits, kind) == (8, "llama")  # for from_pretrained
    assert ("model.safetensors" in files) == ready
    assert ({"quantised.safetensors", "quantised.json"} < files) != ready
    told = made["compressed"]
    assert told["bytes"]["after"] < told["bytes"]["before"] * (0.6 if bits == 8 else 0.5)
    loss = told["loss"]
    assert 0 < abs(loss["after"] - loss["before"]) < (0.02 if bits == 8 else 0.3)
    weights = quantised_weights(tmp_path / "out")
    assert isinstance(weights, Int8Weights if ready else QuantisedWeights)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    ours = load_quantised(tmp_path / "out")
    if ready:
        assert type(ours.model.layers[0].mlp.up_proj.weight.data).__name__ == "Int8Tensor"
    with torch.no_grad():
        before = whole(tokens()).logits
        for name, parameter in whole.named_parameters():
            box = weights.box(name, (0,) * parameter.dim(), tuple(parameter.shape))
            if name in weights.matrices:
                scale = weights.parts(name)[1].max()
                assert 0 < (box - parameter).abs().max() <= scale * 0.51
            else:
                assert torch.equal(box, parameter)
            parameter.copy_(box)
        want, got = whole(tokens()).logits, ours(tokens()).logits
    assert torch.allclose(got, want, rtol=0, atol=2e-5)
    assert (want - before).abs().max() > 1e-3


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    for more in ({"to": "onnx", "prune": "0.5"}, {"prune": "1.5"}, {"prune": "much"}, {"quantise": "int3"}):
        with pytest.raises(UsageError) as caught:
            run(tmp_path, **more)
        assert caught.value.code == "F08"


def test_float64_is_not_quantised(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    trained(tmp_path / "run", KINDS["llama"])
    with pytest.raises(UsageError, match="float64") as caught:
        run(tmp_path / "run", out=tmp_path / "out", quantise="int8", dtype="float64")
    assert caught.value.code == "F08" and not (tmp_path / "out").exists()
