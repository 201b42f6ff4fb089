"""`unisono sync`: a run folder is sent to a tracker, which has each step once; a tracker that fails is exit code 1."""

import json
from pathlib import Path

import pytest

from tests.trackers.paper import served
from unisono import cli
from unisono.spec.sink import SINKS
from unisono.train.sinks.metrics import MetricsSink
from unisono_contrib.verify.conformance.sink import facts, play, records

SINK = f"{Path(__file__).parents[1] / 'trackers' / 'paper.py'}:PaperTracker:url="
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "demo" / "run"
    play(MetricsSink(), facts(folder), records(1, 7))
    (folder / "config.resolved.toml").write_text('name = "demo"\n[train]\nsteps = 7\n')
    return folder


def test_the_tracker_of_the_recipe_gets_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served() as server:
        with (run_dir / "config.resolved.toml").open("a") as file:
            file.write(f'[out]\ntrack = ["csv", "{SINK}{server.url}"]\n')
        for _ in range(2):
            assert cli.main(["sync", str(run_dir), "--json"]) == 0
            said = json.loads(capsys.readouterr().out)
            assert said["to"] == {"paper": {"sent": 7, "steps": 7, "error": ""}}
        assert sorted({step for step, _, _ in server.runs["demo-run"]}) == [*range(1, 8)]
        assert len(server.runs["demo-run"]) == len(set(server.runs["demo-run"]))
        assert server.described["demo-run"][2]["train.steps"] == 7


def test_one_that_refuses_is_an_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served() as server:
        server.mood = "refuses"
        assert cli.main(["sync", str(run_dir), "--to", SINK + server.url, "--patience", "0.5"]) == 1
    printed = capsys.readouterr().err
    assert "U-O04" in printed and "paper has 0 of 7 steps" in printed and "500" in printed


@pytest.mark.parametrize(
    ("words", "code"), [(("--to", "csv"), "U-C04"), ((), "U-C04"), (("--to", "mlfow"), "U-C02")]
)
def test_what_is_no_tracker_is_refused(
    words: tuple[str, ...], code: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sync", str(run_dir), *words]) == 2 and code in capsys.readouterr().err


def test_a_module_that_is_not_installed_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SINKS.find("mlflow"), "needs", ("mlflow_that_is_not_there",))
    assert cli.main(["sync", str(run_dir), "--to", "mlflow"]) == 2
    printed = capsys.readouterr().err
    assert "U-E01" in printed and 'pip install "unisono[mlflow]"' in printed
