"""A resolved recipe leaves nothing open, and writing it down and reading it again changes nothing."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.config import (
    DataConfig,
    LaunchConfig,
    ModelConfig,
    Recipe,
    TrainConfig,
    differences,
    load,
    resolve,
    resolved_toml,
    schema,
)
from unisono.plan import Plan
from unisono.recipes.demo import demo
from unisono.spec.errors import ConfigProblems
from unisono.spec.model import own_model, restored


def problems(recipe: Recipe, plan: str = "dp=1", world: int | None = None, **named) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        resolve(recipe, plan, world, **named)
    assert all(p.fix for p in caught.value.problems)
    return [p.what for p in caught.value.problems]


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["gpt", "mlp", "convnet"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9),
)
def test_written_and_read_again_it_is_the_same(tmp_path_factory, dp, micro, micros, bare, kind, out) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"kind": kind},
            "data": {"source": "stdlib" if kind == "gpt" else "digits"},
            "train": {"global_batch": dp * micro * micros, **({} if bare else {"micro_batch": micro})},
            "out": {"dir": out},
        }
    )
    first = resolve(recipe, Plan(dp=dp, pp=2, micros=micros))
    path = tmp_path_factory.mktemp("run") / "config.resolved.toml"
    path.write_text(resolved_toml(first), encoding="utf-8")
    again = load(path, environ={})
    second = resolve(again.recipe, again.plan)
    assert differences(first.recipe, second.recipe) == []
    assert (second.plan, second.batch) == (first.plan, first.batch)


def test_resolving_twice_is_resolving_once() -> None:
    once = resolve(*demo())
    twice = resolve(once.recipe, once.plan, origins=once.origins)
    assert once == twice


def test_every_line_says_where_its_value_was_made(tmp_path: Path) -> None:
    got = load(None, [("train.steps", "7"), ("train.micro_batch", "4")], {})
    resolved = resolve(got.recipe, got.plan, origins=got.origins)
    text = resolved_toml(resolved)
    assert "steps = 7  # flag --train.steps" in text
    assert "seed = 0  # default" in text
    assert "global_batch 32 = micro_batch 4 x micros 8 x replicas 1" in text
    assert tomllib.loads(text)["train"]["global_batch"] == 32


def test_another_plan_keeps_the_micro_batch() -> None:
    first = resolve(*demo())
    other = resolve(first.recipe, "shard=4")
    assert other.batch.micro_batch == first.batch.micro_batch
    assert other.batch.global_batch == first.batch.global_batch


def test_filling_the_world() -> None:
    assert resolve(Recipe(), "dp=-1 tp=2", 4).plan.dp == 2
    assert resolve(Recipe(launch=LaunchConfig(ranks=8)), "dp=-1 tp=2").plan.dp == 4
    assert "not known" in problems(Recipe(), "dp=-1")[0]
    assert "cannot fill" in problems(Recipe(), "dp=-1 tp=4", 6)[0]
    assert "3 were started" in problems(Recipe(), "dp=2", 3)[0]


def test_float64_means_computing_in_float64() -> None:
    recipe = Recipe(train=TrainConfig(dtype="float64"))
    assert resolve(recipe, "dp=1").plan.precision == "fp64"
    assert resolve(recipe, "precision=fp64").plan.precision == "fp64"
    assert "lose its digits" in problems(recipe, "precision=fp32")[0]


def test_a_wrong_recipe_and_a_wrong_plan_are_told_together() -> None:
    recipe = Recipe(
        model=ModelConfig(n_head=3), data=DataConfig(source="stdlb"), train=TrainConfig(min_lr=1.0)
    )
    found = " | ".join(problems(recipe, "tp=4"))
    for words in ("n_head 3 does not divide d_model", "did you mean stdlib?", "min_lr", "tp=4"):
        assert words in found


def test_places_name_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text('plan = "tp=5"\n[model]\nn_head = 4\n')
    got = load("my.toml", environ={})
    with pytest.raises(ConfigProblems) as caught:
        resolve(got.recipe, got.plan, origins=got.origins)
    assert "plan.tp (my.toml:1), model.n_head (my.toml:3)" in {p.where for p in caught.value.problems}


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ({"kind": "dlrm"}, {}, "reads clicks"),
        ({}, {"source": "clicks"}, "reads tokens"),
        ({"kind": "hf:nobody/nothing"}, {}, "no config.json of nobody/nothing"),
        ({"kind": "none.py:model"}, {}, "no such model file"),
        ({"kind": "mlp"}, {}, "reads pictures"),
        ({}, {"source": "digits"}, "reads tokens"),
        ({}, {"source": "text:"}, "lacks its option path"),
        ({}, {"tokenizer": "bpe"}, "not known"),
        ({}, {"tokenizer": "hf:none"}, "neither a folder with tokenizer.json"),
        ({"n_kv_head": 3}, {}, "n_kv_head 3"),
        ({"kind": "moe", "router": "switch"}, {}, "sends a token to one expert, top_k is 2"),
        ({"kind": "moe", "router": "expert_choice", "aux_loss": 0.1}, {}, "without aux_loss"),
        ({"positions": "rotary", "d_model": 12, "n_head": 4}, {}, "rotary"),
    ],
)
def test_what_does_not_fit_inside_a_recipe(model: dict, data: dict, words: str) -> None:
    assert words in problems(Recipe.model_validate({"model": model, "data": data}))[0]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ({"kind": "gtp"}, "C06", "did you mean gpt?"),
        ({"kind": "mlp", "n_head": "2"}, "C06", "model.n_head means nothing to a model of kind mlp"),
        ({"kind": "dlrm", "n_layer": "2"}, "C06", "model.n_layer means nothing to a model of kind dlrm"),
        ({"n_haed": "2"}, "C01", "did you mean model.n_head?"),
        ({"kind": "mlp", "hidden": "0"}, "C02", "model.hidden"),
        ({"kind": "hf:"}, "C02", "hf:PATH_OR_NAME"),
    ],
)
def test_a_kind_has_its_own_keys(flags: dict, code: str, words: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load(None, [(f"model.{key}", value) for key, value in flags.items()], {})
    problem = caught.value.problems[0]
    assert problem.code == code and "flag --model" in problem.where
    assert words in f"{problem.what} {problem.fix}"


def test_schema_lists_the_keys_of_each_kind() -> None:
    kinds = {kind["title"]: set(kind["properties"]) for kind in schema()["properties"]["model"]["anyOf"]}
    assert {"kind", "hidden", "image"} < kinds["MLPConfig"] and "n_head" not in kinds["MLPConfig"]
    assert {"n_head", "rope_theta"} < kinds["GPTConfig"] < kinds["MoEConfig"]


def test_a_checkpoint_of_before_had_the_keys_of_all_kinds() -> None:
    flat = own_model()(kind="none.py:f").model_dump(mode="json")
    for kind in ("gpt", "mlp", "convnet"):
        assert restored(flat | {"kind": kind}) == ModelConfig(kind=kind)


def test_a_model_file_is_read_before_torch_is(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import torch\ndef make(config): ...\n")
    kind = {"kind": f"{path}:make"}
    resolve(Recipe.model_validate({"model": kind}), "dp=1")
    bad = Recipe.model_validate({"model": {"kind": f"{path}:mak"}})
    assert "did you mean make?" in problems(bad)[0]
    path.write_text("def (")
    assert "not Python" in problems(bad)[0]


def test_derived_widths() -> None:
    assert ModelConfig(d_model=96).ff_width == 384
    assert ModelConfig(d_model=96, activation="swiglu").ff_width == 256
    assert ModelConfig(d_model=100, activation="swiglu").ff_width == 272  # 266.7, up to a multiple of 8
    assert ModelConfig(n_head=8, n_kv_head=2).kv_heads == 2
    assert ModelConfig(n_head=8).kv_heads == 8


@pytest.mark.parametrize(("rule", "peak"), [("linear", 0.08), ("sqrt", 0.04), ("none", 0.02)])
def test_a_rate_grows_with_the_batch_by_the_rule_of_the_recipe(rule: str, peak: float) -> None:
    base = {} if rule == "none" else {"lr_base_batch": 16}
    keys = {"lr": 0.02, "lr_schedule": "constant", "micro_batch": 8, "lr_scaling": rule, **base}
    resolved = resolve(Recipe(train=TrainConfig(**keys)), "dp=2 micros=4")
    train = resolved.recipe.train
    assert (train.lr, train.peak_lr, train.rate()(5)) == (0.02, pytest.approx(peak), pytest.approx(peak))
    words = {
        "linear": "peak lr 0.08 = 0.02 x 64 / 16",
        "sqrt": "peak lr 0.04 = 0.02 x sqrt(64 / 16)",
        "none": "",
    }
    assert train.scaling() == words[rule] and words[rule] in resolved_toml(resolved)
    again = resolve(resolved.recipe, resolved.plan, origins=resolved.origins)
    assert again.recipe.train.peak_lr == train.peak_lr


def test_half_a_scaling_rule_is_refused() -> None:
    assert problems(Recipe(train=TrainConfig(lr_scaling="sqrt"))) == [
        "train.lr_scaling sqrt needs lr_base_batch"
    ]
    alone = problems(Recipe(train=TrainConfig(lr_base_batch=16)))
    assert alone == ["train.lr_scaling none has no use for lr_base_batch"]
    high = {"lr": 0.02, "min_lr": 0.05, "lr_base_batch": 16}
    resolve(Recipe(train=TrainConfig(**high, lr_scaling="linear", global_batch=64)), "dp=1")
    wrong = problems(Recipe(train=TrainConfig(**high, lr_scaling="sqrt", global_batch=64)))
    assert wrong == ["min_lr 0.05 is above lr 0.04"]
