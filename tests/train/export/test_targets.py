"""What `unisono export` writes is loaded by those for whom it is, with equal logits: transformers, peft, onnxruntime,
torch.export."""

import json
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unisono.config import ModelConfig, Recipe
from unisono.models.build import Facts, build
from unisono.models.init import initialise
from unisono.models.lora import adapt
from unisono.spec.errors import UsageError
from unisono.train.export import run
from unisono.train.export.stored import StoredWeights
from unisono.train.state.checkpoint import Box, save

SMALL = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 16, "vocab": 61}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "n_kv_head": 2}
KINDS = {"gpt2": SMALL, "llama": SMALL | LLAMA, "untied": SMALL | LLAMA | {"tie_embeddings": False}}


def trained(
    folder: Path,
    fields: dict[str, Any],
    rank: int = 0,
    tokenizer: str = "char",
    targets: tuple[str, ...] = ("*",),
) -> torch.nn.Module:
    """A run's folder with one checkpoint, of the model that is returned; every number of it matters."""
    config = ModelConfig.model_validate(fields)
    model = build(config, Facts(), "cpu")
    train = {"lora_rank": rank, "lora_alpha": 5.0} if rank else {}
    if rank:
        adapt(model, rank, 5.0, targets)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    recipe = Recipe.model_validate_json(
        json.dumps({"model": fields, "data": {"tokenizer": tokenizer}, "train": train})
    )
    pieces = [
        Box(f"model/{n}", tuple(p.shape), (0,) * p.dim(), p.detach()) for n, p in model.named_parameters()
    ]
    state = {"step": 7, "recipe": recipe.model_dump(mode="json"), "plan": "dp=2 tp=2", "val": [[7, 1.25]]}
    save(folder, 7, pieces, state)
    return model.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        pytest.param("gpt2", ("*",), marks=pytest.mark.slow),
        pytest.param("llama", ("*",), marks=pytest.mark.slow),
        ("untied", ("qkv", "down", "tok")),
    ],
)
def test_adapters(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    tuned = trained(tmp_path / "run", KINDS[kind], rank=2, targets=targets)
    merged = run(tmp_path / "run", out=tmp_path / "merged")
    adapter = run(tmp_path / "run", to="adapter", out=tmp_path / "adapter")
    assert adapter["rank"] == 2 and "adapter_config.json" in adapter["files"]
    with torch.no_grad():
        want = tuned(tokens())
        whole = transformers.AutoModelForCausalLM.from_pretrained(merged["out"]).eval()
        assert torch.allclose(whole(tokens()).logits, want, rtol=0, atol=2e-5)
        # The base: the same weights without adapters, as a run of its own would write them.
        for module in list(tuned.modules()):
            if hasattr(module, "base_layer"):
                module.scale = 0.0  # type: ignore[assignment]
        plain = tuned(tokens())
        base_state = {
            n.replace(".base_layer", ""): p for n, p in tuned.named_parameters() if "lora_" not in n
        }
        ModelConfig.model_validate(KINDS[kind]).export(base_state, tmp_path / "base", None)
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
        assert torch.allclose(base(tokens()).logits, plain, rtol=0, atol=2e-5)
        loaded = peft.PeftModel.from_pretrained(base, adapter["out"]).eval()
        assert torch.allclose(loaded(tokens()).logits, want, rtol=0, atol=2e-5)
    assert (want - plain).abs().max() > 1e-2, "the adapters matter"


def test_several_files_and_narrow_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model = trained(tmp_path / "run", KINDS["llama"])
    monkeypatch.setattr("unisono.models.folder.write_tensors.__defaults__", (20_000, "model.safetensors"))
    made = run(tmp_path / "run", out=tmp_path / "out", dtype="bfloat16")
    assert "model.safetensors.index.json" in made["files"] and len(made["files"]) > 4
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.allclose(theirs(tokens()).logits.float(), model(tokens()), rtol=0.1, atol=0.2)


def test_the_card_tells_plan_recipe_and_proof(tmp_path: Path) -> None:
    trained(tmp_path / "run", KINDS["gpt2"])
    run(tmp_path / "run", out=tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    for said in ("dp=2 tp=2", "ROUNDING", "7 steps", "1.2500", "n_layer", "not been proven"):
        assert said in text
    proof = {"results": [{"plan": "dp=2 tp=2", "pass": True, "max_rel_err": {"grad": 3e-16}}]}
    (tmp_path / "run" / "proof.json").write_text(json.dumps(proof))
    run(tmp_path / "run", out=tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "`dp=2 tp=2` holds" in text and "grad 3.0e-16" in text and "not been proven" not in text


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_a_program_of_torch_export(kind: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "run", KINDS[kind], rank=2)
    made = run(tmp_path / "run", to="torch", out=tmp_path / "out")
    assert made["inputs"] == ["batch", 16] and made["dtype"] == "int64"
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    with torch.no_grad():
        for batch in (tokens(), tokens()[:1]):
            assert torch.allclose(program(batch), model(batch), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(kind: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = trained(tmp_path / "run", KINDS[kind])
    made = run(tmp_path / "run", to="onnx", out=tmp_path / "out")
    assert "model.onnx" in made["files"]
    session = runtime.InferenceSession(
        str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    with torch.no_grad():
        for batch in (tokens(), tokens()[:1]):
            (logits,) = session.run(["logits"], {"inputs": batch.numpy()})
            assert torch.allclose(torch.from_numpy(logits), model(batch), rtol=0, atol=1e-4)


def test_one_tensor_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, few are alive at once."""
    trained(tmp_path / "run", KINDS["llama"] | {"n_layer": 8}, rank=2)
    alive: list[weakref.ref[torch.Tensor]] = []
    most, raw = 0, StoredWeights.raw

    def counted(self: StoredWeights, name: str) -> torch.Tensor:
        nonlocal most
        made = raw(self, name)
        alive.append(weakref.ref(made))
        most = max(most, sum(one() is not None for one in alive))
        return made

    monkeypatch.setattr(StoredWeights, "raw", counted)
    run(tmp_path / "run", out=tmp_path / "out")
    assert len(alive) > 50 and most <= 5  # a weight and its adapter, beside the one before


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    """Of a folder that the data names."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    trained(tmp_path / "run", KINDS["llama"], tokenizer=f"hf:{tmp_path / 'words'}")
    made = run(tmp_path / "run", out=tmp_path / "out")
    assert "tokenizer.json" in made["files"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("b a")["input_ids"] == [1, 0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unisono.cli import main

    trained(tmp_path / "run", KINDS["llama"], rank=2)
    (tmp_path / "run" / "metrics.jsonl").touch()
    words = ["export", str(tmp_path / "run"), "--to", "adapter", "--dtype", "bfloat16", "--json"]
    assert main([*words, "--dry-run"]) == 0
    assert not (tmp_path / "run" / "export-adapter").exists()
    capsys.readouterr()
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["to"], told["rank"], told["step"]) == ("adapter", 2, 7)
    held = load_file(Path(told["out"]) / "adapter_model.safetensors")
    assert {x.dtype for x in held.values()} == {torch.bfloat16}


def test_what_has_no_adapters(tmp_path: Path) -> None:
    trained(tmp_path / "run", KINDS["gpt2"])
    with pytest.raises(UsageError) as caught:
        run(tmp_path / "run", to="adapter", out=tmp_path / "out")
    assert caught.value.code == "F06"


@pytest.mark.parametrize(
    "to", ["torch", *(pytest.param(to, marks=pytest.mark.slow) for to in ("hf", "adapter", "onnx"))]
)
def test_an_export_that_cannot_be_written_leaves_nothing(to: str, tmp_path: Path) -> None:
    """A limit on the size of files fails a write half-way, as a full disk does."""
    trained(tmp_path / "run", KINDS["llama"] | {"d_model": 64}, rank=8)
    mine = tmp_path / "out" / "mine"
    mine.parent.mkdir()
    mine.touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UsageError) as caught:
            run(tmp_path / "run", to=to, out=tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (caught.value.code, caught.value.where) == ("F02", str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == [mine]
