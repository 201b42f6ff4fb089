"""Adapters beside layers, and what does not learn, under every plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.threads import prove
from unisono.config import ModelConfig, Recipe, resolve
from unisono.models.build import Facts, build
from unisono.models.init import initialise
from unisono.models.lora import adapt, choose
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.spec.layout import Split

FIELDS = {
    "n_layer": 4, "n_head": 4, "n_kv_head": 2, "d_model": 16, "context": 8, "positions": "rotary", "norm": "rms",
    "activation": "swiglu", "bias": False,
}  # fmt: skip


def recipe(folder: Path, **train: Any) -> Recipe:
    words = folder / "words.txt"
    words.write_text("the quick brown fox jumps over the lazy dog, and so on\n" * 40)
    keys = {"steps": 3, "global_batch": 12, "micro_batch": 1, "warmup_steps": 0, "lr": 0.05, **train}
    data = {"source": f"text:{words}"}
    return Recipe.model_validate_json(
        json.dumps({"model": FIELDS, "data": data, "train": {"dtype": "float64", **keys}})
    )


def steps(ctx: Any, text: str, plan: str) -> Any:
    """Losses of a rank, names of what it steps and sends, and bytes on `dp`."""
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build as build_run
    from unisono.train.build.build import feeds, place_of
    from unisono.train.data.load import load
    from unisono.train.step.train_step import train_step
    from unisono.train.step.update import state_of

    got = resolve(Recipe.model_validate_json(text), f"{plan} precision=fp64", ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    corpus = load(got.recipe.data, got.recipe.model)
    run = build_run(got.recipe, got.plan, place, corpus, Recorder(ctx.rank))
    before = {slot.name: slot.master.detach().clone() for slot in run.local.slots}
    feed, _ = feeds(got.recipe, got.plan, corpus, place.device)
    losses = [train_step(run, feed.fetch(run.step, run.leaves)).loss for _ in range(3)]
    feed.close()
    return {
        "losses": losses,
        "moved": {s.name for s in run.local.slots if not torch.equal(before[s.name], s.master)},
        "stepped": {s.name for s in run.local.slots if state_of(run.update.optimizer, s.master)},
        "sent": sum(s.master.nbytes for s in run.gradients.slots),
        "held": sum(s.master.nbytes for s in run.local.slots),
    }


def held_to_one_device(folder: Path, threads: Any, train: dict[str, Any], plans: tuple[str, ...]) -> None:
    text = recipe(folder, **train).model_dump_json()
    want = threads(steps, 1, text=text, plan="dp=1")[0]["losses"]
    assert want[-1] < want[0] - 1e-3, "something is learnt"
    for plan in plans:
        for rank in threads(steps, Plan.parse(plan).world, text=text, plan=plan):
            assert rank["losses"] == pytest.approx(want, rel=1e-12, abs=1e-12), plan
            assert rank["moved"] <= rank["stepped"]
            learns = ("lora_A", "lora_B") if "lora_rank" in train else ("head", "blocks.3")
            assert all(any(word in name for word in learns) for name in rank["stepped"])
            assert rank["sent"] < rank["held"] / 2


def test_same_losses(tmp_path: Path, threads: Any) -> None:
    held_to_one_device(tmp_path, threads, {"lora_rank": 2}, ("tp=2 pp=2",))


@pytest.mark.slow
def test_same_losses_under_all_axes(tmp_path: Path, threads: Any) -> None:
    plans = ("dp=3", "tp=2 pp=2", "shard=2", "pp=2 shard=2 zero=1")
    held_to_one_device(tmp_path, threads, {"lora_rank": 2}, plans)
    held_to_one_device(tmp_path, threads, {"train_only": ("head.*", "blocks.3.*")}, plans)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2 pp=2", "shard=2 cp=2", "dp=2 sync=canonical:shards=2 tp=2", "tp=3"])
def test_proven(plan: str, tmp_path: Path) -> None:
    asked = recipe(tmp_path, lora_rank=3, lora_targets=("qkv", "down", "*.gate"), global_batch=16)
    (proof,) = prove(asked, [Plan.parse(f"{plan} precision=fp64")], 2)
    assert proof.passed


def adapted(**keys: Any) -> torch.nn.Module:
    model = build(ModelConfig.model_validate({**FIELDS, "vocab": 61}), Facts(), "cpu")
    adapt(model, 2, 4.0, keys.get("targets", ("*",)))
    initialise(model, 0)
    return model


def test_an_adapter_adds_nothing_at_first() -> None:
    """And the weights beside it are those of the model without it."""
    plain = build(ModelConfig.model_validate({**FIELDS, "vocab": 61}), Facts(), "cpu")
    model = adapted()
    theirs = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        parameter.data = theirs[name].data
    tokens = torch.randint(0, 61, (2, 8))
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
        model.blocks[0].attn.proj.lora_B.weight += 0.1  # type: ignore[index,union-attr]
        assert not torch.equal(model(tokens), plain(tokens))


def test_what_is_dealt_of_an_adapter() -> None:
    anatomy = adapted(targets=("qkv", "blocks.1.mlp.down")).anatomy
    cut = {name: anatomy.split_of(name) for name in (
        "blocks.0.attn.qkv", "blocks.0.attn.qkv.base_layer", "blocks.0.attn.qkv.lora_A", "blocks.0.attn.qkv.lora_B",
        "blocks.1.mlp.down.lora_A", "blocks.1.mlp.down.lora_B", "blocks.0.mlp.down", "blocks.1.mlp.up",
    )}  # fmt: skip
    column, row = Split.COLUMN, Split.ROW
    assert list(cut.values()) == [None, column, None, column, row, None, row, column]


def test_a_table_has_an_adapter_where_it_is_named() -> None:
    untied = {**FIELDS, "vocab": 61, "tie_embeddings": False}
    for targets, there in ((("*",), False), (("tok",), True), (("stem.*", "qkv"), True)):
        model = build(ModelConfig.model_validate(untied), Facts(), "cpu")
        plain = build(ModelConfig.model_validate(untied), Facts(), "cpu")
        adapt(model, 2, 4.0, targets)
        initialise(model, 0)
        theirs = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
        for name, parameter in plain.named_parameters():
            parameter.data = theirs[name].data
        assert any("lora_embedding_A" in name for name, _ in model.named_parameters()) is there
        assert (model.anatomy.split_of("stem.tok.lora_embedding_A") is Split.VOCAB_IN) is there  # type: ignore[union-attr]
        with torch.no_grad():
            tokens = torch.randint(0, 61, (2, 8))
            assert torch.equal(model(tokens), plain(tokens))
            if there:
                model.stem.tok.lora_embedding_A.weight[tokens[0, 0]] += 0.1  # type: ignore[union-attr,index,operator]
                assert not torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize(
    ("more", "target", "words"),
    [
        ({}, "tok", "stem.tok can have no adapter|its weight is also head.out.weight"),
        ({}, "out", "head.out lies outside of the blocks"),
        ({"kind": "moe", "n_experts": 4}, "router", "is a router"),
        ({"kind": "moe", "n_experts": 4}, "experts", "all experts as one stack"),
    ],
    ids=["tied", "classifier", "router", "experts"],
)
def test_what_can_have_none_says_why(more: dict[str, Any], target: str, words: str) -> None:
    model = build(ModelConfig.model_validate({**FIELDS, "vocab": 61, **more}), Facts(), "meta")
    with pytest.raises(UsageError, match=words) as caught:
        adapt(model, 2, 4.0, (target,))
    assert caught.value.code == "C06" and "qkv" in caught.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2 pp=2", "shard=2 cp=2", "tp=3"])
def test_tables_and_shared_experts_are_proven(plan: str, tmp_path: Path) -> None:
    """Of a table alone, and under many experts of those layers that all tokens meet."""
    table = {**FIELDS, "tie_embeddings": False}
    sparse = {**table, "kind": "moe", "n_experts": 4, "n_shared_experts": 1}
    for fields, targets in ((table, ("tok", "qkv")), (sparse, ("tok", "blocks.*.shared.*"))):
        of = recipe(tmp_path, lora_rank=2, lora_targets=targets, freeze=("blocks.0.*",), global_batch=8)
        of = of.model_copy(update={"model": ModelConfig.model_validate(fields)})
        (proof,) = prove(of, [Plan.parse(f"{plan} precision=fp64")], 1)
        assert proof.passed, proof


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="nope") as caught:
        adapted(targets=("nope",))
    assert "qkv" in caught.value.fix
    model = adapted()
    with pytest.raises(UsageError, match="body"):
        choose(model, ["body.*"], [])
    with pytest.raises(UsageError, match="nothing is left"):
        choose(build(ModelConfig.model_validate({**FIELDS, "vocab": 61}), Facts(), "cpu"), ["*"], [])


def test_more_may_learn_beside_adapters() -> None:
    model = adapted(targets=("qkv",))
    choose(model, [], ["head.*"])
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-2] for name in learns} == {"lora_A", "lora_B", "norm"}
