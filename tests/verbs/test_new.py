"""`unisono new` writes a recipe that trains, and takes no file away."""

import json
from pathlib import Path

import pytest

from unisono import cli, config


@pytest.mark.parametrize(
    "flags",
    [[], ["--plan", "dp=2 pp=2", "--train.steps", "7"], ["--model", "mlp", "--data.source", "digits"]],
    ids=["as it is", "flags", "another kind"],
)
def test_what_it_writes_is_a_recipe_that_says_what_each_key_means(tmp_path: Path, flags: list[str]) -> None:
    file = tmp_path / "mine.toml"
    assert cli.main(["new", str(file), *flags, "--quiet"]) == 0
    loaded = config.load(file)
    resolved = config.resolve(loaded.recipe, loaded.plan)
    assert resolved.recipe.name == "mine"
    if "--plan" in flags:
        assert (resolved.plan.dp, resolved.plan.pp, resolved.recipe.train.steps) == (2, 2, 7)
    lines = [line for line in file.read_text().splitlines() if "=" in line or "not set" in line]
    assert all(line.partition("  # ")[2].strip() for line in lines), lines


def test_a_file_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("mine")
    assert cli.main(["new", str(file)]) == 2
    assert "is there already" in capsys.readouterr().err and file.read_text() == "mine"


@pytest.mark.parametrize(
    "words", [["mine.txt"], ["mine.toml", "--train.steps", "-1"], ["no/where/mine.toml"]]
)
def test_what_cannot_be_trained_or_written_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", *words]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", str(tmp_path / "mine.toml"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["name"] == "mine"
    assert list(tmp_path.iterdir()) == []
