"""What the planner thinks of a change to a run: a ratio of seconds a sample, or nothing."""

from pathlib import Path

import pytest

from tests.report.runs import write_run
from unisono.verbs._prices import prices_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", dp=1, pp=2, micros=4, steps=4)


def test_more_micro_batches_fill_a_pipeline(run: Path) -> None:
    price = prices_of(run, {"HOME": str(run)})
    ratio = price('--plan "dp=1 pp=2 schedule=1f1b micros=8"')
    assert ratio is not None and 0.5 < ratio < 1
    assert price('--plan "dp=1 pp=2 schedule=1f1b micros=4"') == pytest.approx(1)


@pytest.mark.parametrize(
    "change", ['--plan "pp=3 micros=5"', '--plan "nonsense=1"', "--train.global_batch none"]
)
def test_what_cannot_be_run_has_no_price(run: Path, change: str) -> None:
    assert prices_of(run, {"HOME": str(run)})(change) is None


def test_a_run_whose_recipe_is_gone_has_none(run: Path) -> None:
    (run / "config.resolved.toml").unlink()
    assert prices_of(run, {"HOME": str(run)})("") is None
