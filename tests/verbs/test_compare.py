"""`unisono compare`: one object, one page, one picture; runs of two plans with the same bits are found to have them."""

import json
import shutil
from pathlib import Path

import pytest

from tests.report.runs import write_run
from tests.verbs import jobs
from tests.verbs.jobs import unisono
from unisono import cli

KEPT = Path(__file__).parents[1] / "fixtures" / "run-f903854"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two runs in the working folder, one with half the steps of the other."""
    monkeypatch.chdir(tmp_path)
    for name, steps in (("a", 40), ("b", 20)):
        write_run(Path("runs", name, "1"), steps=steps)
    return ["runs/a/1", "runs/b"]


def test_the_object_and_the_files(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *pair, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema_version"] == 1 and said["baseline"] == "a"
    assert [run["run_dir"] for run in said["runs"]] == ["runs/a/1", "runs/b/1"]
    assert [run["steps"] for run in said["runs"]] == [40, 20]
    assert said["bits"][0]["bit_identical"] and said["bits"][0]["steps_compared"] == 20
    assert said["differences"] == [{"key": "train.steps", "values": [40, 20]}]
    assert said["files"] == ["runs/a/1/compare.html", "runs/a/1/compare.png"]
    assert all(Path(file).stat().st_size for file in said["files"])


def test_the_table(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *pair, "--out", "out.png"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "out.png" and captured.err == ""
    assert [line.split()[0] for line in lines[2:5]] == ["run", "a", "b"]
    assert "have the same bits" in captured.out and "train.steps" in lines[-1]
    assert sorted(path.name for path in Path().iterdir()) == ["out.png", "runs"]


def test_a_dry_run_writes_nothing(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *pair, "--dry-run"]) == 0
    assert capsys.readouterr().out == "would compare a, b and write runs/a/1/compare.html\n"
    assert not list(Path("runs").rglob("compare*"))


def test_a_place_that_cannot_be_written_is_an_error(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert cli.main(["compare", *pair, "--out", "file/out.html"]) == 2
    assert "error U-E02  cannot write file/out.html" in capsys.readouterr().err


def test_runs_of_an_older_version_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They kept checkpoints of the same step under two plans, one of them summed in another order."""
    shutil.copytree(KEPT, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    assert cli.main(["compare", "runs/old", "runs/canonical", "--json"]) == 0
    (bits,) = json.loads(capsys.readouterr().out)["bits"]
    assert bits["steps_compared"] == 6 and bits["bit_identical"] is False
    assert bits["checkpoints"]["first"]["step"] == 3 and bits["checkpoints"]["first"]["what"] == "weights"
    assert 0 < bits["checkpoints"]["first"]["tensor"]["largest"] < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_under_two_canonical_plans_have_the_same_bits_and_another_rate_is_seen_in_step_2(
    tmp_path: Path,
) -> None:
    place = jobs.folder_with(tmp_path)
    words = ("--train.steps", "6", "--train.warmup_steps", "0", "--train.keep", "9", "--quiet", "--json")
    runs = []
    for plan, more in (("dp=2", ()), ("pp=2", ()), ("dp=2", ("--train.lr", "0.002"))):
        done = unisono(place, "train", "recipe.toml", "--plan", f"{plan} sync=canonical", *more, *words)
        assert done.code == 0, done.err
        runs.append(done.object["run_dir"])
    compared = unisono(place, "compare", *runs, "--json")
    assert compared.code == 0, compared.err
    same, other = compared.object["bits"]
    assert same["bit_identical"] is True and same["checkpoints"]["compared"] == [3, 6]
    assert other["first_divergence"]["step"] == 2 and other["first_divergence"]["key"] == "loss"
    assert other["checkpoints"]["first"]["step"] == 3
