"""Values come from defaults, files, variables and flags in that order; every mistake is told at once, with its place."""

import textwrap
from pathlib import Path

import pytest

from unisono import config
from unisono.config import Recipe, load, split_flags
from unisono.spec.errors import ConfigProblems, Problem, UsageError, UserCodeError


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def make(name: str, text: str) -> str:
        Path(name).write_text(textwrap.dedent(text).lstrip("\n"))
        return name

    return make


def problems(*given, **named) -> dict[str, Problem]:
    """By place."""
    with pytest.raises(ConfigProblems) as caught:
        load(*given, **{"environ": {}, **named})
    return {p.where: p for p in caught.value.problems}


def test_nothing_given_is_the_defaults() -> None:
    got = load(environ={})
    assert got.recipe == Recipe()
    assert set(got.origins.values()) == {"default"}


def test_later_layers_win_and_say_where_they_were_made(write) -> None:
    write("base.toml", "[train]\nsteps = 1\nlr = 0.1\nclip = 0.5\neval_every = 7\n")
    write("my.toml", 'extends = "base.toml"\nname = "mine"\n[train]\nlr = 0.2\nclip = 0.6\neval_every = 8\n')
    got = load(
        "my.toml",
        [("train.eval_every", "10")],
        {"UNISONO_TRAIN_CLIP": "0.7", "UNISONO_TRAIN__EVAL_EVERY": "9", "HOME": "/", "UNISONO__TOKEN": "x"},
    )
    train, origins = got.recipe.train, got.origins
    assert (train.steps, train.lr, train.clip, train.eval_every) == (1, 0.2, 0.7, 10)
    assert origins["train.steps"] == "base.toml:2"
    assert origins["train.lr"] == "my.toml:4"
    assert origins["train.clip"] == "env UNISONO_TRAIN_CLIP"
    assert origins["train.eval_every"] == "flag --train.eval_every"
    assert origins["name"] == "my.toml:2"
    assert origins["seed"] == "default"


def test_extends_is_relative_to_the_file_that_says_so(write, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write("deep/a.toml", "seed = 3\n")
    write("deep/b.toml", 'extends = "a.toml"\n')
    write("c.toml", 'extends = "deep/b.toml"\n')
    assert load("c.toml", environ={}).recipe.seed == 3


def test_extends_in_a_circle_or_into_nothing(write) -> None:
    write("a.toml", 'extends = "b.toml"\n')
    write("b.toml", 'extends = "a.toml"\n')
    assert "circle" in problems("a.toml")["b.toml:1"].what
    write("c.toml", '\nextends = "none.toml"\n')
    assert "not there" in problems("c.toml")["c.toml:1"].what  # the dedented text starts at the key


def test_every_mistake_at_once_with_its_line_and_remedy(write) -> None:
    write(
        "bad.toml",
        """
        sed = 1
        plan = "dp=2 ppp=2"
        steps = 3
        model = 4
        [train]
        stpes = 5
        steps = -1
        lr = "fast"
        betas = [0.9, 1.5]
        optimizer = "adam"
        [lunch]
        ranks = 2
        """,
    )
    found = problems(
        "bad.toml", [("train.clp", "1"), ("data.val_fraction", "x")], environ={"UNISONO_SEED": "y"}
    )
    assert "did you mean seed?" in found["bad.toml:1"].what
    assert "did you mean pp?" in found["bad.toml:2"].what
    assert "did you mean train.steps?" in found["bad.toml:3"].what
    assert "section" in found["bad.toml:4"].what
    assert "did you mean train.steps?" in found["bad.toml:6"].what
    assert "train.steps = -1" in found["bad.toml:7"].what
    assert 'train.lr = "fast"' in found["bad.toml:8"].what
    assert "train.betas" in found["bad.toml:9"].what
    assert "adamw" in found["bad.toml:10"].what
    assert "did you mean [launch]?" in found["bad.toml:11"].what
    assert "did you mean train.clip?" in found["flag --train.clp"].what
    assert "number" in found["flag --data.val_fraction"].what
    assert "whole number" in found["env UNISONO_SEED"].what
    assert all(p.fix for p in found.values())


@pytest.mark.parametrize("text", ["steps = ", "[train", "a = 1\na = 2", "x = 'y"])
def test_broken_toml_is_one_problem_with_its_line(write, text: str) -> None:
    write("broken.toml", text)
    (place,) = problems("broken.toml")
    assert place.startswith("broken.toml")


def test_a_missing_file_names_its_neighbour(write) -> None:
    write("mine.toml", "")
    assert "did you mean mine.toml?" in problems("mien.toml")["mien.toml"].fix


def test_types_are_strict_in_files(write) -> None:
    write("t.toml", "[train]\nsteps = true\nlr = 1\nfused = 1\nwarmup_steps = 2.0\n")
    assert set(problems("t.toml")) == {"t.toml:2", "t.toml:4", "t.toml:5"}


def test_python_function_is_equally_good(write) -> None:
    write(
        "rec.py",
        """
        from unisono.config import Recipe, TrainConfig
        from unisono.plan import Plan

        def small():
            return Recipe(name="fn", train=TrainConfig(steps=5)), Plan(dp=2)

        def alone():
            return Recipe(plan="tp=2")

        def wrong():
            return 3

        def raises():
            raise RuntimeError("mine")
        """,
    )
    got = load("rec.py:small", [("train.lr", "0.5")], {})
    assert (got.recipe.name, got.recipe.train.steps, got.recipe.train.lr) == ("fn", 5, 0.5)
    assert str(got.plan) == "dp=2"
    assert got.origins["train.steps"] == "rec.py:small"
    assert str(load("rec.py:alone", environ={}).plan) == "tp=2"
    assert str(load("rec.py:small", [("plan", "pp=2")], {}).plan) == "pp=2"
    with pytest.raises(UsageError, match="not \\(Recipe, Plan\\)"):
        load("rec.py:wrong", environ={})
    with pytest.raises(UsageError, match="did you mean small"):
        load("rec.py:smal", environ={})
    with pytest.raises(UsageError, match="no such file"):
        load("rex.py:small", environ={})
    with pytest.raises(UserCodeError, match="RuntimeError: mine") as caught:
        load("rec.py:raises", environ={})
    assert caught.value.where.endswith("rec.py:14 in raises")


def test_flags_in_all_spellings() -> None:
    pairs, rest = split_flags(
        "my.toml --train.steps 5 --train.lr=1e-3 --train.compile --no-train.fused --out.report false "
        "--train.betas 0.9,0.99 --json --seed 3 --train.async_save --model.n_head 2 other".split()
    )
    assert rest == ["my.toml", "--json", "other"]
    got = load(None, pairs, {}).recipe
    assert (got.train.steps, got.train.lr, got.seed, got.model.n_head) == (5, 1e-3, 3, 2)
    assert (got.train.compile, got.train.fused, got.out.report, got.train.async_save) == (
        True,
        False,
        False,
        True,
    )
    assert got.train.betas == (0.9, 0.99)


@pytest.mark.parametrize("words", ["--model convnet", "--model=convnet", "--model.kind convnet"])
def test_a_model_is_named_by_its_kind(words: str) -> None:
    pairs, rest = split_flags(f"{words} --model.n_layer 3 --json".split())
    got = load(None, pairs, {})
    assert (got.recipe.model.kind, got.recipe.model.n_layer, rest) == ("convnet", 3, ["--json"])
    assert got.origins["model.kind"] == "flag --model.kind"


def test_a_flag_without_its_value() -> None:
    pairs, _ = split_flags(["--model", "--json"])
    assert "lacks its value" in problems(None, pairs)["flag --model.kind"].what
    pairs, _ = split_flags(["--train.steps", "--json"])
    assert "lacks its value" in problems(None, pairs)["flag --train.steps"].what


def test_numbers_as_people_write_them() -> None:
    got = load(
        None, [("train.steps", "1e3"), ("train.micro_batch", "none"), ("data.source", "text:1.txt")], {}
    )
    assert (got.recipe.train.steps, got.recipe.train.micro_batch, got.recipe.data.source) == (
        1000,
        None,
        "text:1.txt",
    )


def test_schema_knows_every_key() -> None:
    found = config.schema()
    assert {"name", "seed", "plan", "extends", "model", "train"} <= set(found["properties"])
    assert found["additionalProperties"] is False


OWN = '''
from typing import ClassVar

from pydantic import Field

from unisono.spec.model import ModelConfig


class Wide(ModelConfig):
    """A layer of a user's own."""

    name: ClassVar[str] = "wide"

    width: int = Field(default=8, gt=0, description="of the layer")
    rates: tuple[float, ...] = Field(default=(), description="a few")
    gated: bool = Field(default=False, description="with a gate")

    def build(self, facts):
        from torch import nn

        from unisono.models.chain import Chain
        from unisono.spec.layout import Anatomy

        stem = nn.Embedding(facts.vocab, self.width)
        return Chain(stem, nn.ModuleList(), nn.Linear(self.width, facts.vocab), Anatomy())
'''


def test_a_kind_of_a_users_own_has_keys_of_its_own(write) -> None:
    write("mine.py", OWN)
    write("my.toml", '[model]\nkind = "mine.py:Wide"\nwidth = 16\nrates = [0.5, 0.25]\n')
    got = load("my.toml", [("model.gated", "true")], {"UNISONO_MODEL_WIDTH": "32"})
    model = dict(got.recipe.model)
    own = {"width": 32, "rates": (0.5, 0.25), "gated": True}
    assert model == {"kind": "mine.py:Wide", "weights": None, **own}
    assert got.origins["model.rates"] == "my.toml:4" and got.origins["model.gated"] == "flag --model.gated"
    first = load("my.toml", environ={})
    write("again.toml", config.resolved_toml(config.resolve(first.recipe, first.plan)))
    assert load("again.toml", environ={}).recipe.model == first.recipe.model
    other = load("my.toml", [("model.width", "9")], {}).recipe
    assert config.differences(got.recipe, other)[0] == ("model.width", 32, 9)


def test_mistakes_in_keys_of_a_users_own_kind_are_told_where_they_were_made(write) -> None:
    write("mine.py", OWN)
    write("my.toml", '[model]\nkind = "mine.py:Wide"\nwidth = "16"\nwidht = 3\n')
    found = problems("my.toml", [("model.gated", "perhaps"), ("model.rates", "0.5,x")])
    assert {where: problem.code for where, problem in found.items()} == {
        "my.toml:3": "C02",
        "my.toml:4": "C01",
        "flag --model.gated": "C02",
        "flag --model.rates": "C02",
    }
    assert "unknown key model.widht" in found["my.toml:4"].what
    assert "with a gate, default False" in found["flag --model.gated"].fix


def test_keys_of_a_users_own_kind_mean_nothing_to_others(write) -> None:
    write("my.toml", '[model]\nkind = "gpt"\nwidth = 16\n')
    assert problems("my.toml")["my.toml:3"].code == "C01"
    write("net.py", "def net(vocab):\n    pass\n")
    write("own.toml", '[model]\nkind = "net.py:net"\nwidth = 16\n')
    assert problems("own.toml")["own.toml:3"].code == "C01"


def test_a_folder_of_runs_means_its_newest(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine" / "20260101-000000-abcd"
    run.mkdir(parents=True)
    (run / "config.resolved.toml").write_text('name = "mine"\nseed = 7\n')
    for place in (run, run.parent):
        assert config.load(place).recipe.seed == 7
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigProblems, match=r"config\.resolved\.toml"):
        config.load(tmp_path / "elsewhere")
