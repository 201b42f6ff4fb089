"""Pretrained folders of transformers, trained under plans and written back: the library loads them, with the logits that
the run had; adapters are loaded by peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf.families import theirs, written
from unisono.config import ModelConfig, Recipe, resolve
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.train.export import run as export

transformers = pytest.importorskip("transformers")
TEXT = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "
TOLD = {
    "gemma2": 1e-6
}  # the library keeps the scale of the embedding in the dtype in which it made the model


def saved(family: str, folder: Path, **how: Any) -> tuple[Any, Path]:
    """The library's own model with weights of its own, and its folder."""
    model = theirs(written(family, folder / "config"))
    model.save_pretrained(folder / "theirs", **how)
    return model.eval(), folder / "theirs"


def recipe(folder: Path, kind: Path, model: dict[str, Any] | None = None, **train: Any) -> Recipe:
    (folder / "text.txt").write_text(TEXT * 8)
    keys = {
        "steps": 3,
        "global_batch": 6,
        "micro_batch": 1,
        "warmup_steps": 0,
        "lr": 0.01,
        "dtype": "float64",
        **train,
    }
    return Recipe.model_validate_json(
        json.dumps(
            {
                "model": {"kind": f"hf:{kind}", **(model or {})},
                "data": {"source": f"text:{folder / 'text.txt'}"},
                "train": keys,
            }
        )
    )


def steps(ctx: Any, text: str, plan: str, count: int, folder: str = "") -> list[float]:
    """Losses of a rank; a checkpoint in `folder`."""
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, feeds, place_of
    from unisono.train.data.load import load
    from unisono.train.state.checkpoint import save
    from unisono.train.state.run_state import pieces_of
    from unisono.train.step.train_step import train_step

    got = resolve(Recipe.model_validate_json(text), f"{plan} precision=fp64", ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    corpus = load(got.recipe.data, got.recipe.model)
    run = build(got.recipe, got.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(got.recipe, got.plan, corpus, place.device)
    losses = [train_step(run, feed.fetch(run.step, run.leaves)).loss for _ in range(count)]
    feed.close()
    if folder:
        state = {"step": count, "recipe": got.recipe.model_dump(mode="json"), "plan": str(got.plan)}
        save(Path(folder), count, pieces_of(run), state, rank=ctx.rank, world=ctx.world, token="t")
        run.mesh.world.barrier()
    return losses


def loaded(folder: Any, **how: Any) -> Any:
    """By the library, with experts that it can compute in float64."""
    eager = (
        {"experts_implementation": "eager"} if "Mixtral" in (Path(folder) / "config.json").read_text() else {}
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how, **eager)


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.double().eval()(tokens).logits


def untouched(family: str, plan: str, folder: Path, threads: Any) -> None:
    """Loaded by ranks, saved and exported without a step, the folder holds what it held."""
    model, there = saved(family, folder, max_shard_size="20KB")
    assert (there / "model.safetensors.index.json").is_file()
    text = recipe(folder, there).model_dump_json()
    threads(steps, Plan.parse(plan).world, text=text, plan=plan, count=0, folder=str(folder / "run"))
    made = export(folder / "run", out=folder / "out")
    assert {"config.json", "generation_config.json", "README.md"} <= set(made["files"])
    again, report = loaded(folder / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.allclose(logits(again), logits(model), rtol=0, atol=TOLD.get(family, 0.0))


@pytest.mark.parametrize(("family", "plan"), [("llama", "tp=2 pp=2"), ("mixtral", "shard=2")])
def test_there_and_back(family: str, plan: str, tmp_path: Path, threads: Any) -> None:
    untouched(family, plan, tmp_path, threads)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "gemma2"])
def test_there_and_back_of_other_families(family: str, tmp_path: Path, threads: Any) -> None:
    untouched(family, "tp=2 pp=2", tmp_path, threads)


def tuned(family: str, plans: tuple[str, ...], folder: Path, threads: Any) -> None:
    """Adapters learn the same under all plans, and peft loads them; merged, transformers does."""
    peft = pytest.importorskip("peft")
    model, there = saved(family, folder)
    text = recipe(folder, there, lora_rank=2).model_dump_json()
    want = threads(steps, 1, text=text, plan="dp=1", count=3)[0]
    assert want[-1] < want[0]
    for plan in plans:
        for losses in threads(
            steps, Plan.parse(plan).world, text=text, plan=plan, count=3, folder=str(folder / "run")
        ):
            assert losses == pytest.approx(want, rel=1e-6 if family == "gemma2" else 1e-12)
    adapter = export(folder / "run", to="adapter", out=folder / "adapter")
    merged = export(folder / "run", out=folder / "merged")
    base = loaded(there, dtype=torch.float64)
    near = TOLD.get(family, 0.0)
    assert torch.allclose(logits(base), logits(model), rtol=0, atol=near), "what it began from is as it was"
    adapted = logits(peft.PeftModel.from_pretrained(base, adapter["out"]))
    whole = logits(loaded(merged["out"]))
    assert torch.allclose(adapted, whole, rtol=0, atol=1e-12)
    assert (adapted - logits(model)).abs().max() > 1e-3, "something was learnt"


@pytest.mark.slow
def test_adapters(tmp_path: Path, threads: Any) -> None:
    tuned("llama", ("tp=2 pp=2",), tmp_path, threads)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "gemma2"])
def test_adapters_of_other_families(family: str, tmp_path: Path, threads: Any) -> None:
    tuned(family, ("dp=3", "shard=2", "tp=2 pp=2"), tmp_path, threads)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_graphs(family: str, tmp_path: Path, threads: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    _, there = saved(family, tmp_path)
    text = recipe(tmp_path, there).model_dump_json()
    threads(steps, 1, text=text, plan="dp=1", count=1, folder=str(tmp_path / "run"))
    want_of = transformers.AutoModelForCausalLM.from_pretrained(
        export(tmp_path / "run", out=tmp_path / "hf", dtype="float32")["out"]
    ).eval()
    tokens = torch.randint(0, 250, (3, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = want_of(tokens).logits
    export(tmp_path / "run", to="torch", out=tmp_path / "torch", dtype="float32")
    program = torch.export.load(tmp_path / "torch" / "model.pt2").module()
    with torch.no_grad():
        assert torch.allclose(program(tokens), want, rtol=0, atol=2e-5)
    export(tmp_path / "run", to="onnx", out=tmp_path / "onnx", dtype="float32")
    session = runtime.InferenceSession(
        str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(["logits"], {"inputs": tokens.numpy()})
    assert torch.allclose(torch.from_numpy(found), want, rtol=0, atol=1e-4)


def test_where_weights_come_from(tmp_path: Path) -> None:
    empty = written("llama", tmp_path / "empty")
    kind = f"hf:{empty}"
    assert ModelConfig(kind=kind).begins_from() is None
    with pytest.raises(UsageError) as caught:
        ModelConfig(kind=kind, pretrained=True).begins_from()
    assert caught.value.code == "W01"
    (empty / "model.safetensors").touch()
    assert ModelConfig(kind=kind).begins_from() == str(empty)
    assert ModelConfig(kind=kind, pretrained=False).begins_from() is None
    assert ModelConfig(kind=kind, weights="elsewhere").begins_from() == "elsewhere"


def test_weights_that_no_run_begins_from_are_not_passed_over(tmp_path: Path) -> None:
    """Drawing them from the seed would tell nobody that they were not read."""
    empty = written("llama", tmp_path / "empty")
    kind = f"hf:{empty}"
    (empty / "quantised.safetensors").touch()
    with pytest.raises(UsageError, match=r"quantised\.safetensors") as caught:
        ModelConfig(kind=kind).begins_from()
    assert caught.value.code == "W01"
    assert ModelConfig(kind=kind, pretrained=False).begins_from() is None
    (empty / "pytorch_model.bin").touch()
    assert ModelConfig(kind=kind).begins_from() == str(empty / "pytorch_model.bin")
    said = json.loads((empty / "config.json").read_text())
    (empty / "config.json").write_text(json.dumps({**said, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UsageError, match="quantization_config"):
        ModelConfig(kind=kind).begins_from()


def test_a_context_beyond_the_model_is_told_at_once(tmp_path: Path) -> None:
    kind = f"hf:{written('llama', tmp_path / 'config')}"
    (found,) = ModelConfig(kind=kind, context=32).problems()
    assert (found.code, found.where) == ("C22", "model.context") and "16" in str(found)
    assert not list(ModelConfig(kind=kind, context=16).problems())


def test_pickled_weights_and_bytes(tmp_path: Path, threads: Any) -> None:
    """A folder with pytorch_model.bin alone begins a run; one on bytes is exported with their tokenizer."""
    model, there = saved("llama", tmp_path)
    (there / "model.safetensors").unlink()
    torch.save(model.state_dict(), there / "pytorch_model.bin")
    text = recipe(tmp_path, there).model_dump_json()
    threads(steps, 1, text=text, plan="dp=1", count=0, folder=str(tmp_path / "run"))
    export(tmp_path / "run", out=tmp_path / "out")
    assert torch.allclose(logits(loaded(tmp_path / "out")), logits(model), rtol=0, atol=0)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert sorted(words("To be é")["input_ids"]) == sorted("To be é".encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [("mixtral", "int8"), ("mixtral", "int4"), ("qwen3", "int8"), ("gemma2", "int8")]
)
def test_quantised_folders_of_families(family: str, kind: str, tmp_path: Path, threads: Any) -> None:
    """Loaded with the logits of the numbers that are written, 8 bits by the library; routers and experts stay whole."""
    pytest.importorskip("torchao")
    from unisono_contrib.train.export.quantised import load_quantised, quantised_weights

    _, there = saved(family, tmp_path)
    text = recipe(tmp_path, there).model_dump_json()
    threads(steps, 1, text=text, plan="dp=1", count=0, folder=str(tmp_path / "run"))
    export(tmp_path / "run", out=tmp_path / "whole", dtype="float32")
    export(tmp_path / "run", out=tmp_path / "out", dtype="float32", quantise=kind)
    if kind == "int4":
        found = load_quantised(tmp_path / "out")
    else:
        found, report = loaded(tmp_path / "out", output_loading_info=True)
        assert not any(report.values()), report
    whole, weights = loaded(tmp_path / "whole"), quantised_weights(tmp_path / "out")
    tokens = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before, changed = whole(tokens).logits, 0
        for name, parameter in whole.named_parameters():
            if name in weights.matrices:
                parameter.copy_(weights.box(name, (0, 0), tuple(parameter.shape)))
                changed += 1
        want, got = whole(tokens).logits, found(tokens).logits
    assert changed >= 8 and (want - before).abs().max() > 1e-4
    assert torch.allclose(got, want, rtol=0, atol=2e-5)
