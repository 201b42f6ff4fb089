"""`unisono ask`: the verdict on a run, on a stretch of it, and what it says where it does not understand."""

import json
from pathlib import Path

import pytest

from tests.report.runs import write_run
from unisono import cli


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(write_run(Path("runs/a/1"), dp=3, steps=60, straggler=2, slow=2.0))


def test_the_object_is_the_verdict(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", run, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema_version"] == 1 and said["understood"]
    assert (said["cause"], said["rank"], said["sure"]) == ("straggler", 2, True)
    assert said["evidence"] and 0 < said["gain_s"] <= said["cost_s"] < said["step_s"]
    assert said["window"] == said["steps"] == [7, 60]


def test_a_question_looks_at_a_stretch(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", run, "why is rank 2 slow, steps 20 to 40?", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["window"] == said["steps"] == [20, 40]
    assert any(row.startswith("rank 2 (dp=2): forward") for row in said["beside"])


def test_for_people_and_what_is_not_understood(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", run, "tell me a story"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "about  no time, step or rank was understood: this is the whole run"
    assert out[1].startswith("Limited by rank 2 (dp=2), in ")


def test_no_run_and_a_dry_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", "nowhere"]) == 2
    assert "error U-C03" in capsys.readouterr().err
    assert cli.main(["ask", run, "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would judge {run}\n"
