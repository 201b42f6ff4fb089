"""plan --check: the best plans are played here, and what is told of them adds up."""

import json
from pathlib import Path

import pytest

from tests.planner.cores import MACHINE
from unisono.cli import main
from unisono.measure.calibrate import as_toml

pytestmark = pytest.mark.timeout(120)
RECIPE = """
[model]
kind = "gpt"
n_layer = 2
n_head = 2
d_model = 32
context = 16
vocab = 64
[train]
global_batch = 8
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def test_prices_stand_beside_what_was_measured(recipe: Path, tmp_path: Path, capsys) -> None:
    here = tmp_path / "here.toml"
    here.write_text(as_toml(MACHINE, "a test"))
    words = ["plan", str(recipe), "--cluster", str(here), "--check", "--top", "2", "--json"]
    assert main(words) == 0
    got = json.loads(capsys.readouterr().out)
    assert [row["plan"] for row in got["check"]] == [row["plan"] for row in got["plans"]]
    for row in got["check"]:
        assert row["measured_s"] > 0
        assert row["error_pct"] == pytest.approx(100 * (row["step_s"] / row["measured_s"] - 1))
    fastest = min(row["measured_s"] for row in got["check"])
    assert got["regret_pct"] == pytest.approx(100 * (got["check"][0]["measured_s"] / fastest - 1))


def test_without_a_measurement_it_says_how_to_get_one(
    recipe: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert main(["plan", str(recipe), "--check"]) == 2
    assert "unisono calibrate" in capsys.readouterr().err


def test_plans_for_another_machine_are_not_played_on_this_one(recipe: Path, capsys) -> None:
    assert main(["plan", str(recipe), "--cluster", "dgx-a100", "--check", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert "another machine" in said["what"] and "unisono calibrate" in said["try"]
