"""`unisono runs`: a table and one object, runs beside each other, and no run pruned that another one came from."""

import json
import os
from pathlib import Path

import pytest

from tests.report.test_catalogue import run_in
from unisono import cli
from unisono.observe.files import lock_now


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A run, one that came from it, and one that came from that."""
    monkeypatch.chdir(tmp_path)
    known: list[Path] = []
    for name in "abc":
        known.append(
            run_in(Path("runs", name, f"{name}1"), "start", "end", parent=known[-1] if known else None)
        )
    (Path("runs") / "c" / "latest").write_text("c1\n")
    return known


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert cli.main(["runs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_and_the_object(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "state", "step"] and [line.split()[0] for line in lines[1:]] == [
        *map(str, three)
    ]
    assert "0a1b2c3d+" in lines[1] and "runs/a/a1/step-000010" in lines[2] and "20/20" in lines[1]
    runs = said("--parent", "runs/b/b1", capsys=capsys)["runs"]
    assert isinstance(runs, list) and [run["folder"] for run in runs] == ["runs/c/c1"]
    assert cli.main(["runs", "--name", "nobody"]) == 0 and capsys.readouterr().out == "no run\n"


def test_they_are_compared_as_compare_does(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    got = said("--compare", "--out", "out.png", capsys=capsys)
    assert got["baseline"] == "a" and got["files"] == ["out.png"]


def test_nothing_is_pruned_without_yes(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    got = said("--prune", capsys=capsys)
    assert got["did"] is False and got["pruned"] == [*map(str, three)] and all(run.exists() for run in three)
    assert said("--prune", "--yes", "--dry-run", capsys=capsys)["did"] is False and three[0].exists()


def test_what_another_run_came_from_stays(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    got = said(
        "--prune", "--keep", "0", "--name", "stdlib-gpt", "--parent", "runs/a/a1", "--yes", capsys=capsys
    )
    assert got["pruned"] == [] and got["stays"] == [{"folder": "runs/b/b1", "why": "runs/c/c1 came from it"}]
    newest = said("--sort", "began", "--reverse", "--keep", "1", "--prune", "--yes", capsys=capsys)
    assert newest["pruned"] == [], "the first is needed by the second, and that by the third, which is kept"
    assert all(run.exists() for run in three)
    forced = said("--parent", "runs/a/a1", "--prune", "--yes", "--force", capsys=capsys)
    assert (
        forced["pruned"] == ["runs/b/b1"]
        and not three[1].exists()
        and three[0].exists()
        and three[2].exists()
    )


def test_a_run_that_trains_stays_even_by_force(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = os.open(three[2], os.O_RDONLY)
    assert lock_now(folder)
    got = said("--prune", "--yes", "--force", capsys=capsys)
    os.close(folder)
    assert got["stays"] == [{"folder": "runs/c/c1", "why": "it trains"}] and three[2].exists()
    assert got["pruned"] == ["runs/a/a1", "runs/b/b1"] and not Path("runs/a").exists()
    assert said("--prune", "--yes", capsys=capsys)["did"] and not Path("runs/c").exists(), (
        "and nothing names it"
    )


def test_checkpoints_alone_can_go(three: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    (three[2] / "checkpoints" / "step-000001").mkdir(parents=True)
    assert said("--name", "*", "--sort", "size", "--prune", "checkpoints", "--yes", capsys=capsys)["did"]
    assert three[2].exists() and not (three[2] / "checkpoints").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere"],
        ["--state", "dead"],
        ["--metric", "loss"],
        ["--sort", "nothing"],
        ["--compare", "--name", "x"],
    ],
)
def test_mistakes(three: list[Path], capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(["runs", *words]) == 2
    assert capsys.readouterr().err.startswith("error U-C0")
