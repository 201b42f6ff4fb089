"""Run folders made by an older version (at commit f903854, by `unisono train`) go on, are reported and are exported.

Both runs were to make 6 steps, saved after 3, and were lost at the end: their metrics say what 4 to 6 have to give.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.verbs.jobs import losses, unisono

pytestmark = pytest.mark.timeout(300)

KEPT = Path(__file__).parents[1] / "fixtures" / "run-f903854"
PLANS = {"old": "dp=2", "canonical": "pp=2 sync=canonical"}


@pytest.fixture(params=PLANS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one of the runs; its folder's folder's folder is where it was started."""
    shutil.copytree(KEPT, tmp_path / "old")
    (run,) = (tmp_path / "old" / "runs" / request.param).glob("2*")
    return run


def counted_from_one(losses: dict[int, float]) -> dict[int, float]:
    """Steps as they are counted now; those runs counted from 0."""
    return {step + 1: loss for step, loss in losses.items()}


def test_it_goes_on_as_it_would_have(run: Path) -> None:
    before = counted_from_one(losses(run))
    done = unisono(run.parents[2], "train", "--resume", str(run), "--json")
    assert done.code == 0, done.err
    assert (done.object["resumed_from"], done.object["steps"]) == ("step-000003", 6)
    assert done.object["plan"].startswith(PLANS[run.parent.name].split()[0])
    # Not to the last bit: another kind of CPU rounds otherwise.
    assert losses(run) == pytest.approx(before, abs=1e-4)
    assert (run / "latest").read_text().strip() == "checkpoints/step-000006"


def test_it_goes_on_under_another_plan(run: Path) -> None:
    before = counted_from_one(losses(run))
    done = unisono(run.parents[2], "train", "--resume", str(run), "--plan", "tp=2", "--json")
    assert done.code == 0, done.err
    assert losses(run) == pytest.approx(before, abs=1e-4)


def test_it_is_reported_and_exported(run: Path, tmp_path: Path) -> None:
    reported = unisono(run.parents[2], "report", str(run), "--json")
    assert reported.code == 0, reported.err
    assert reported.object["missing"] == []
    assert reported.object["judged"]["cause"] == "cannot tell", "five steps of before there were arrivals"
    assert run.name in (run / "report.html").read_text()
    exported = unisono(
        run.parents[2], "export", str(run), "--to", "hf", "--out", str(tmp_path / "hf"), "--json"
    )
    assert exported.code == 0, exported.err
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["n_embd"] == 8
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 8000
