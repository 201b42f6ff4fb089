"""Exported models compute the same logits in `transformers`, which is the judge."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.config import ModelConfig, Recipe
from unisono.models.build import Facts, build
from unisono.models.gpt.export import export_state
from unisono.models.init import initialise
from unisono.spec.errors import UsageError
from unisono.train.export import run
from unisono.train.state.checkpoint import Box, save

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(180)  # importing the judge alone takes some seconds

SMALL = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 16, "vocab": 61}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu"}
LAYOUTS = {
    "gpt2": {},
    "gpt2 untied": {"tie_embeddings": False},
    "gpt2 without biases": {"bias": False},
    "gpt2 of its own width": {"d_ff": 40, "dropout": 0.1},
    "llama": LLAMA | {"bias": False, "tie_embeddings": False},
    "llama tied, with biases": LLAMA,
    "llama, grouped heads": LLAMA | {"n_kv_head": 2, "bias": False, "rope_theta": 500000.0},
    "llama, one group, wide": LLAMA | {"n_kv_head": 1, "d_ff": 72, "tie_embeddings": False},
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the judge would look up elsewhere, it has to do without."""

    def refuse(*args: object) -> None:
        raise OSError("the network is not for tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def gpt(fields: dict[str, Any], dtype: torch.dtype) -> tuple[torch.nn.Module, ModelConfig]:
    """A model whose every number matters: no bias is zero, no norm's weight is one."""
    config = ModelConfig.model_validate(SMALL | fields)
    model = build(config, Facts(), "cpu").to(dtype)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model, config


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_logits(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == torch.float64:  # its own norm computes in float32, whatever the model's type
        norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
        monkeypatch.setattr(norm, "forward", lambda self, x: _rms(x, self.weight, self.variance_epsilon))
    model, config = gpt(LAYOUTS[name], dtype)
    written = export_state(model.state_dict(), config, tmp_path)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), f"nothing is missing, nothing left over: {report}"
    assert (
        type(theirs).__name__ == {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[written["layout"]]
    )
    assert written["layout"] == name.split()[0].rstrip(",")
    assert theirs.dtype == dtype
    tokens = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, logits = model(tokens), theirs.eval()(tokens).logits
    # In float64 the angles of rotary positions are still float32, on both sides.
    assert torch.allclose(logits, ours, rtol=0, atol=2e-8 if dtype == torch.float64 else 2e-5)
    assert ours.std() > 0.5, "the comparison compares something"


def test_generation_stays_equal(tmp_path: Path) -> None:
    """Step by step with a cache, the judge writes what we would write."""
    model, config = gpt(LLAMA | {"n_kv_head": 2}, torch.float64)
    export_state(model.state_dict(), config, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    start = torch.tensor([[5, 17, 3]])
    made = theirs.generate(start, max_new_tokens=12, do_sample=False, pad_token_id=0)
    ours = start
    with torch.no_grad():
        for _ in range(12):
            ours = torch.cat([ours, model(ours)[:, -1:].argmax(-1)], dim=1)
    assert made.tolist() == ours.tolist()


def test_byte_tokenizer(tmp_path: Path) -> None:
    model, config = gpt({"vocab": 256}, torch.float32)
    export_state(model.state_dict(), config, tmp_path, tokenizer="byte")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(x):\n\treturn  x\n", "äöü € 😀 \u00ad\x7f\x01", " leading", ""):
        assert theirs(text)["input_ids"] == list(text.encode())
        assert theirs.decode(list(text.encode())) == text
    assert theirs.convert_tokens_to_ids(theirs.convert_ids_to_tokens(list(range(256)))) == list(range(256))


def checkpoint(run_dir: Path, model: torch.nn.Module, recipe: Recipe) -> Path:
    pieces = [
        Box(f"model/{name}", tuple(p.shape), (0,) * p.dim(), p.detach(), True)
        for name, p in model.named_parameters()
    ]
    pieces.append(Box("optim/stem.tok.weight/step", (), (), torch.tensor(7.0), True))
    return save(run_dir, 7, pieces, {"step": 7, "recipe": recipe.model_dump(mode="json")})


def test_export_of_a_run(tmp_path: Path) -> None:
    model, config = gpt({"vocab": 256}, torch.float32)
    checkpoint(tmp_path, model, Recipe(model=config))
    result = run(tmp_path, out=tmp_path / "out")
    assert result["step"] == 7 and result["layout"] == "gpt2" and result["tokenizer"] == "byte"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == result["files"]
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1, "who may read one may read all"
    assert json.loads(json.dumps(result)) == result
    theirs = transformers.pipeline("text-generation", str(tmp_path / "out"))
    assert len(theirs("def", max_new_tokens=3, do_sample=False, pad_token_id=0)[0]["generated_text"]) >= 3
    assert sum(p.numel() for p in theirs.model.parameters()) == result["parameters"]


def test_mistakes(tmp_path: Path) -> None:
    def refused(code: str, call: Any) -> UsageError:
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == code and caught.value.fix
        return caught.value

    mixed = refused("F01", ModelConfig(positions="rotary", n_kv_head=2).layout)
    assert 'positions = "rotary"' in mixed.likely and 'norm = "layer"' in mixed.likely
    assert "n_kv_head = 2" in refused("F01", ModelConfig(n_kv_head=2).layout).likely
    refused("F01", ModelConfig(kind="mlp").layout)
    refused("F03", lambda: run(tmp_path))
    refused("F04", lambda: run(tmp_path, to="cloud"))
    (tmp_path / "file").touch()
    model, config = gpt({}, torch.float32)
    refused("F02", lambda: export_state(model.state_dict(), config, tmp_path / "file"))
