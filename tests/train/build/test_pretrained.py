"""Runs that begin from weights of others: each rank gets its boxes of them, whatever the plan and whatever the form."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.threads import prove
from unisono.config import ModelConfig, Recipe, resolve
from unisono.models.build import Facts, build
from unisono.models.folder import Outgoing, write_tensors
from unisono.models.gpt.export import entries_of
from unisono.models.init import initialise
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.train.build.pretrained import beginning, layout_of
from unisono.train.foreign import open_weights
from unisono.train.state.checkpoint import Box, save

SMALL = {"n_layer": 4, "n_head": 4, "d_model": 16, "context": 8, "vocab": 64}
LLAMA = {"n_kv_head": 2, "positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
KINDS = {
    "gpt2": SMALL,
    "gpt2 untied": SMALL | {"tie_embeddings": False},
    "llama": SMALL | LLAMA,
    "llama untied": SMALL | LLAMA | {"tie_embeddings": False},
}


def made(fields: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Weights of a model, by our names."""
    model = build(ModelConfig.model_validate(fields), Facts(), "cpu").to(dtype)
    initialise(model, 7)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(
            dtype
        )
    return {name: p.detach() for name, p in model.named_parameters()}


def written(
    folder: Path, fields: dict[str, Any], state: dict[str, torch.Tensor], limit: int = 1 << 40
) -> Path:
    """The folder, as `export` writes it."""
    model = ModelConfig.model_validate(fields)
    folder.mkdir(exist_ok=True)
    write_tensors(folder, entries_of(state, model, model.layout()), limit)
    return folder


def recipe(folder: Path, fields: dict[str, Any], **train: Any) -> Recipe:
    words = folder / "words.txt"
    words.write_text("the quick brown fox jumps over the lazy dog, and so on\n" * 40)
    keys = {"steps": 3, "global_batch": 12, "micro_batch": 1, "warmup_steps": 0, "lr": 0.01, **train}
    data = {"source": f"text:{words}", "tokenizer": "char"}
    return Recipe.model_validate_json(json.dumps({"model": fields, "data": data, "train": keys}))


def boxes(ctx: Any, text: str, plan: str) -> list[Any]:
    """What a rank holds before its first step."""
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build as build_run
    from unisono.train.build.build import place_of
    from unisono.train.data.load import load

    got = resolve(Recipe.model_validate_json(text), plan, ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    run = build_run(got.recipe, got.plan, place, load(got.recipe.data, got.recipe.model), Recorder(ctx.rank))
    owners = run.local.owners
    return [(owners.get(s.name, s.name), s.start, s.master.detach().clone()) for s in run.local.slots]


@pytest.mark.parametrize(
    "plan", ["dp=1", "shard=3", "tp=2 pp=2", "shard=2 zero=1 tp=2", "pp=2 shard=2", "tp=3"]
)
def test_each_rank_gets_its_boxes(plan: str, tmp_path: Path, threads: Any) -> None:
    fields = KINDS["llama"] if "tp" in plan else KINDS["gpt2"]
    state = made(fields)
    folder = written(tmp_path / "theirs", fields, state, limit=4000)
    assert len(list(folder.glob("*.safetensors"))) > 2, "in several files"
    text = recipe(tmp_path, fields | {"weights": str(folder)}).model_dump_json()
    seen = {name: torch.zeros_like(x) for name, x in state.items()}
    for held in threads(boxes, Plan.parse(plan).world, text=text, plan=plan):
        for name, start, box in held:
            cut = tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))
            assert torch.equal(box, state[name][cut]), name
            seen[name][cut] = 1
    assert all(bool(x.all()) for x in seen.values()), "all of the model is held by somebody"


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_go_there_and_back(kind: str, tmp_path: Path) -> None:
    fields, state = KINDS[kind], made(KINDS[kind])
    model = build(ModelConfig.model_validate(fields), Facts())
    weights = open_weights(written(tmp_path / "theirs", fields, state))
    layout = layout_of(ModelConfig.model_validate(fields), model, weights)
    from unisono.models.weights import read_box

    for name, whole in state.items():
        start = tuple(n // 3 for n in whole.shape)
        out = torch.empty([n - n // 3 for n in whole.shape], dtype=torch.float64)
        read_box(layout[name], weights, start, out)
        cut = tuple(slice(a, None) for a in start)
        assert torch.equal(out, whole[cut].double()), name


def test_narrow_weights_into_a_wide_run(tmp_path: Path, threads: Any) -> None:
    fields = KINDS["gpt2"]
    state = {name: x.bfloat16() for name, x in made(fields).items()}
    folder = written(tmp_path / "theirs", fields, state)
    text = recipe(tmp_path, fields | {"weights": str(folder)}, dtype="float64").model_dump_json()
    (held,) = threads(boxes, 1, text=text, plan="precision=fp64")
    assert all(torch.equal(box, state[name].double()) and box.dtype == torch.float64 for name, _, box in held)


def test_a_run_of_ours(tmp_path: Path, threads: Any) -> None:
    """Also its single files, and its checkpoints, by their own names."""
    fields, state = KINDS["gpt2"], made(KINDS["gpt2"])
    pieces = [Box(f"model/{name}", tuple(x.shape), (0,) * x.dim(), x) for name, x in state.items()]
    save(tmp_path / "run", 3, pieces, {"step": 3})
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000003"):
        text = recipe(tmp_path, fields | {"weights": str(path)}).model_dump_json()
        for held in threads(boxes, 2, text=text, plan="shard=2"):
            for name, (first, *_), box in held:
                assert torch.equal(box, state[name][first : first + len(box)])


@pytest.mark.slow
def test_proven(tmp_path: Path) -> None:
    fields = KINDS["llama"]
    folder = written(tmp_path / "theirs", fields, made(fields))
    asked = recipe(tmp_path, fields | {"weights": str(folder)}, dtype="float64")
    plans = [Plan.parse(f"{text} precision=fp64") for text in ("tp=2 pp=2", "shard=3")]
    for proof in prove(asked, plans, 2):
        assert proof.passed


@pytest.mark.parametrize("odd", [0, 1])
def test_where_a_tensor_begins_does_not_matter(odd: int, tmp_path: Path) -> None:
    """A header may have any length, by the format."""
    whole, one = torch.randn(6, 4), torch.tensor(3.5)
    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]},
            "b": {"dtype": "F32", "shape": [], "data_offsets": [96, 100]},
        }
    ).encode()
    header += b" " * (-len(header) % 8 + odd)
    data = whole.numpy().tobytes() + one.numpy().tobytes()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    weights = open_weights(tmp_path / "a.safetensors")
    assert torch.equal(weights.box("a", (0, 0), (6, 4)), whole)
    assert torch.equal(weights.box("a", (2, 1), (3, 2)), whole[2:5, 1:3])
    assert torch.equal(weights.box("b", (), ()), one)


OWN = """
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return self.down(gate.sigmoid() * value)

def net(vocab, context):
    return nn.Sequential(nn.Embedding(vocab, 8), Gated(), nn.Linear(8, vocab))
"""


def test_a_module_of_ones_own(tmp_path: Path, threads: Any) -> None:
    """Its state_dict, as torch.save writes it, under the names and in the order that its author knows."""
    (tmp_path / "own.py").write_text(OWN)
    nets: dict[str, Any] = {}
    exec(OWN, nets)
    theirs = nets["net"](256, 8)
    torch.save({"model": {f"module.{k}": v for k, v in theirs.state_dict().items()}}, tmp_path / "own.pt")
    fields = {"kind": f"{tmp_path}/own.py:net", "context": 8, "weights": str(tmp_path / "own.pt")}
    text = recipe(tmp_path, fields).model_dump_json().replace('"char"', '"byte"')
    names = build(ModelConfig.model_validate(fields), Facts(vocab=256)).cut_names
    want = {name: theirs.get_parameter(own.name) for name, own in names.items()}  # type: ignore[union-attr]
    both = [name for name, own in names.items() if own.name.startswith("1.up")]  # type: ignore[union-attr]
    assert len(both) == 2
    for up in both:  # held with gate and value of a feature side by side
        want[up] = want[up].unflatten(0, (2, 16)).transpose(0, 1).flatten(0, 1)
    for held in threads(boxes, 2, text=text, plan="shard=2"):
        for name, (first, *_), box in held:
            assert torch.equal(box, want[name][first : first + len(box)])


NORMED = """
from torch import nn

class Looks(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, classes)
        self.spare = nn.Linear(3, 3)

    def forward(self, x):
        y = self.head(self.norm(x.flatten(1)))
        return y

class Branches(Looks):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y

def looks(classes):
    return Looks(classes)

def branches(classes):
    return Branches(classes)
"""


@pytest.mark.parametrize("name", ["looks", "branches"])
def test_running_statistics_come_with_the_weights(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(NORMED)
    nets: dict[str, Any] = {}
    exec(NORMED, nets)
    theirs = nets[name](10)
    theirs(torch.randn(32, 64))
    torch.save({f"module.{k}": v for k, v in theirs.state_dict().items()}, tmp_path / "own.pt")
    config = ModelConfig.model_validate(
        {"kind": f"{tmp_path}/own.py:{name}", "weights": str(tmp_path / "own.pt")}
    )
    model = build(config, Facts(classes=10, sample_shape=(1, 8, 8)))
    assert beginning(config, model, lambda name: torch.zeros(())) is not None
    held = {n: b for block in model.blocks for n, b in block.held.items()} or dict(model.named_buffers())  # type: ignore[union-attr,operator]
    found = {n.rpartition(".")[2]: b for n, b in held.items()}
    assert torch.equal(found["running_mean"], theirs.norm.running_mean) and found["num_batches_tracked"] == 1


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    fields, state = KINDS["gpt2"], made(KINDS["gpt2"])
    config = ModelConfig.model_validate(fields)
    model = build(config, Facts())
    entries = entries_of(state, config, "gpt2")

    def refused(code: str, *names: str) -> UsageError:
        with pytest.raises(UsageError) as caught:
            layout_of(config, model, open_weights(tmp_path))
        assert caught.value.code == code and caught.value.fix
        assert all(name in caught.value.what for name in names), caught.value.what
        return caught.value

    gone = "transformer.h.2.mlp.c_fc.weight"
    write_tensors(tmp_path, [entry for entry in entries if entry.name != gone])
    refused("W02", gone)
    more = Outgoing("transformer.h.9.ln_1.weight", torch.float32, (16,), lambda: torch.ones(16))
    write_tensors(tmp_path, [*entries, more])
    refused("W03", more.name)
    wide = [
        replace(entry, shape=(32,), make=lambda: torch.ones(32))
        if entry.name.endswith("2.ln_1.bias")
        else entry
        for entry in entries
    ]
    write_tensors(tmp_path, wide)
    refused("W04", "transformer.h.2.ln_1.bias is [32] there and [16] here")
    write_tensors(tmp_path, [more])
    refused("W02")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-3])
    refused("W01", "incomplete")
    (tmp_path / "model.safetensors").unlink()
    refused("W01")
