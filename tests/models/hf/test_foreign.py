"""What is inferred of foreign models, what of them is kept, refused and priced."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf.families import CONFIGS, theirs, to_ours, to_theirs, written
from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.models.build import build
from unisono.models.documents import Documents
from unisono.models.hf.apart import Making, taken_apart
from unisono.models.hf.attention import ForeignCore
from unisono.models.noise import Dropout, Noise
from unisono.models.weights import shapes_there
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.spec.layout import Split
from unisono.spec.model import Facts


def made(family: str, folder: Path, facts: Facts = Facts(), **other: Any) -> Any:
    return build(ModelConfig(kind=f"hf:{written(family, folder, **other)}", context=16), facts)


def recipe(family: str, folder: Path, **other: Any) -> Recipe:
    (folder / "text.txt").write_text("what is in a name? that which we call a rose. " * 16)
    train = TrainConfig(steps=3, global_batch=4, micro_batch=1, lr=1e-2, warmup_steps=1, dtype="float64")
    data = DataConfig(source=f"text:{folder / 'text.txt'}")
    return Recipe(
        seed=3, model=ModelConfig(kind=f"hf:{written(family, folder, **other)}"), data=data, train=train
    )


def test_parts_are_those_of_the_model(tmp_path) -> None:
    model = made("llama", tmp_path)
    splits = model.anatomy.splits
    dealt = {split: [n for n, s in splits.items() if s is split] for split in Split}
    layer = "blocks.*.layer"
    assert dealt[Split.COLUMN] == [
        *(f"{layer}.self_attn.{n}_proj" for n in "qkv"), f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj",
    ]  # fmt: skip
    assert dealt[Split.ROW] == [f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"]
    assert dealt[Split.VOCAB_IN] == ["stem.base.embed_tokens"] and dealt[Split.VOCAB_OUT] == [
        "head.model.lm_head"
    ]
    assert (model.anatomy.divides["heads"], model.anatomy.divides["key/value heads"]) == (4, 2)
    assert any("LlamaForCausalLM: stem model.embed_tokens" in line for line in model.notes)
    assert type(model.blocks[0].layer).__module__ == "transformers.models.llama.modeling_llama"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_what_is_inferred_without_a_published_plan_is_what_is_published(
    family, tmp_path, monkeypatch
) -> None:
    from unisono.models.hf import build as building

    told = made(family, tmp_path).anatomy

    def unpublished(of: Making) -> Any:
        of.model._tp_plan = {}
        return taken_apart(of)

    monkeypatch.setattr(building, "taken_apart", unpublished)
    assert made(family, tmp_path).anatomy == told and not told.uncut


def test_what_cannot_be_dealt_is_named(tmp_path) -> None:
    fused = made(
        "phi3", tmp_path, **{k: v for k, v in CONFIGS["llama"].items() if k != "head_dim"}, pad_token_id=0
    )
    assert "self_attn.qkv_proj" in fused.anatomy.uncut and "mlp.gate_up_proj" in fused.anatomy.uncut
    assert Split.CORE in fused.anatomy.splits.values() and Split.COLUMN not in fused.anatomy.splits.values()


@pytest.mark.parametrize(
    ("family", "other", "facts", "words"),
    [
        ("llama", {}, Facts(vocab=300), "300 tokens"),
        ("vit", {}, Facts(classes=7), "7 classes"),
        ("vit", {}, Facts(sample_shape=(3, 8, 8)), "reads pictures of (1, 8, 8)"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            Facts(),
            "dynamic",
        ),
        ("mixtral", {"hidden_act": "gelu"}, Facts(), "GELU"),
        ("mixtral", {"output_router_logits": True}, Facts(), "output_router_logits"),
        ("llama", {"architectures": ["LlamaModel"]}, Facts(), "no logits"),
        ("bloom", {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4}, Facts(), "is given"),
        (
            "opt",
            {
                "vocab_size": 256,
                "hidden_size": 32,
                "ffn_dim": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 16,
                "word_embed_proj_dim": 32,
            },
            Facts(),
            "cannot be taken apart",
        ),
    ],
)
def test_refused_in_words(family: str, other: dict[str, Any], facts: Facts, words: str, tmp_path) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        made(family, tmp_path, facts, **other)


def test_no_config_is_told(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"sizes": 1}))
    for kind, words in (
        (f"hf:{tmp_path}", "names no model_type"),
        ("hf:no/such", "no config.json of no/such"),
    ):
        (problem,) = ModelConfig(kind=kind).problems()
        assert words in problem.what and problem.code == "C22"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bert", "gpt2"])
def test_constants_and_logits_are_the_librarys(family: str, tmp_path) -> None:
    """Also that what is computed of no weight, as rotary frequencies are, survives a model without memory."""
    model, right = made(family, tmp_path), theirs(tmp_path)
    state = right.state_dict()
    ours = to_ours(model.names, state)
    model.to_empty(device="cpu").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.copy_(ours[model.names.ties.get(name, name)])
    tokens = torch.randint(0, 256, (2, 16))
    torch.testing.assert_close(model(tokens), right(tokens).logits, rtol=0.0, atol=1e-12)


def test_files_are_those_that_the_library_writes(tmp_path) -> None:
    from safetensors.torch import load_file

    model, right = made("mixtral", tmp_path), theirs(tmp_path)
    right.save_pretrained(tmp_path / "saved")
    there = load_file(tmp_path / "saved" / "model.safetensors")
    ours = to_ours(model.names, there, files=True)
    assert {name: tuple(x.shape) for name, x in there.items()} == shapes_there(model.names.files)
    for name, x in to_theirs(model.names, ours).items():
        assert torch.equal(x, right.state_dict()[name]), name


def test_first_weights_follow_the_familys_rule(tmp_path) -> None:
    rules = made("gpt2", tmp_path, initializer_range=0.03).initial_rules()
    assert rules["blocks.1.layer.mlp.c_fc.weight"] == ("normal", 0.03)
    kind, scale = rules["blocks.1.layer.mlp.c_proj.weight"]
    assert kind == "normal" and scale == pytest.approx(0.03 / 2)  # over √(2 · 2 layers)
    assert rules["blocks.0.layer.ln_1.weight"] == ("ones", 0.0)
    assert made("gemma2", tmp_path).initial_rules()["head.model.model.norm.weight"] == ("zeros", 0.0)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (3, 2.0)])
def test_attention_stays_inside_documents_and_windows(window: int, softcap: float) -> None:
    core = ForeignCore(Dropout(0.0), True, window, softcap)
    q, k, v = (torch.randn(1, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2))
    ids = torch.tensor([[0] * 4 + [1] * 5])
    packed = core(q, k, v, Noise(None, torch.zeros(1), documents=Documents.of(ids)))
    apart = [core(q[:, :, s], k[:, :, s], v[:, :, s], None) for s in (slice(4), slice(4, 9))]
    torch.testing.assert_close(packed, torch.cat(apart, 2))
    far = core(q, k, v, None)
    k[:, :, 0], v[:, :, 0] = 7.0, 7.0
    changed = [
        not torch.equal(a, b) for a, b in zip(core(q, k, v, None).unbind(2), far.unbind(2), strict=True)
    ]
    assert changed == [not window or i < window for i in range(9)]


@pytest.mark.slow
def test_dropout_is_that_of_one_device(tmp_path) -> None:
    noisy = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    (proof,) = prove(recipe("gpt2", tmp_path, **noisy), [Plan.parse("cp=2 tp=2 precision=fp64")], steps=1)
    assert proof.passed, proof


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama", "pp=2 tp=2 recompute=selective"),
        ("llama", "dp=2 shard=2 recompute=full"),
        ("llama", "dp=2 sync=canonical pp=2"),
        ("llama", "shard=2 zero=1 tp=2 schedule=zb1p pp=2"),
        ("gpt2", "pp=2 schedule=interleaved:v=1 dp=2"),
        ("mixtral", "shard=2 tp=2 cp=2 ep=2"),
        ("qwen2", "tp=2 cp=2 cp_kind=gather"),
        ("mistral", "shard=2 cp=2 offload=activations"),
        ("llama", "pp=2 schedule=dualpipev micros=4 recompute=selective"),
        ("qwen3", "cp=2 cp_kind=ulysses shard=2 offload=optimizer"),
        ("llama", "pp=2 shard=2 blocks=0-1:recompute=full;2-3:zero=2"),
    ],
)
def test_plans_are_one_device(family: str, plan: str, tmp_path) -> None:
    layers = {"num_hidden_layers": 4} if "dualpipev" in plan or "blocks" in plan else {}
    (proof,) = prove(recipe(family, tmp_path, **layers), [Plan.parse(f"{plan} precision=fp64")], steps=2)
    assert proof.passed, proof


def test_virtual_shards_are_refused(tmp_path) -> None:
    asked = Plan.parse("dp=2 sync=canonical:shards=2")
    assert any("virtual shards" in p.what for p in asked.check(recipe("llama", tmp_path)))
