"""Which run folder a path means."""

import os
from pathlib import Path

import pytest

from unisono.spec.errors import UsageError
from unisono.spec.runs import CONFIG, run_folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for i, name in enumerate(("a", "b", "c")):
        run = tmp_path / "runs" / "mine" / name
        run.mkdir(parents=True)
        (run / CONFIG).touch()
        os.utime(run, (1000 + i, 1000 + i))
    return tmp_path / "runs"


def test_a_run_is_itself_and_above_it_the_newest_or_what_latest_names(runs: Path) -> None:
    assert run_folder(runs / "mine" / "a") == runs / "mine" / "a"
    assert run_folder(runs) == run_folder(runs / "mine") == runs / "mine" / "c"
    (runs / "mine" / "latest").write_text("b\n")
    assert run_folder(runs / "mine") == runs / "mine" / "b"
    (runs / "mine" / "latest").write_text("gone\n")
    assert run_folder(runs / "mine") == runs / "mine" / "c"


def test_no_run_and_no_folder_are_told_with_the_nearest(runs: Path) -> None:
    with pytest.raises(UsageError, match="no such run folder") as caught:
        run_folder(runs / "mime")
    assert "did you mean" in caught.value.fix and caught.value.fix.endswith("mine?")
    (runs / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no run"):
        run_folder(runs / "empty")
