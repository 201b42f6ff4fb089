"""A disk that fills up: training goes on, the end says what could not be saved, and what was saved before is whole."""

import re
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import checkpoints, unisono

pytestmark = [pytest.mark.timeout(150), pytest.mark.root]


def test_a_disk_that_fills_up_between_checkpoints(tmp_path: Path) -> None:
    """Room for the run folder and one checkpoint, not for two."""
    place = jobs.folder_with(tmp_path)
    flags = ("--model.d_model", "64", "--train.save_every", "2", "--train.trace_steps", "0")
    with jobs.small_disk(tmp_path / "runs", "size=2560k"):
        done = unisono(place, "train", "recipe.toml", "--json", *flags)
        assert done.code == done.object["exit"] == 2 and done.left == (), done.err
        assert done.block.startswith(
            "error U-K02  checkpoint step-30 could not be written: No space left on device: needs 1"
        )
        for step in range(4, 30, 2):  # each was tried
            assert re.search(
                rf"checkpoint step-{step} could not be written: No space left on device: needs 1\.\d MiB, has .*;"
                rf" training goes on, the next is tried at step {step + 2}",
                " ".join(done.err.split()),
            ), step
        assert "the disk is full" in done.block and "Traceback" not in done.err
        (run,) = jobs.runs_of(place)
        assert checkpoints(run) == ["step-000002"]
        assert f"kept    checkpoints/step-000002: unisono train --resume runs/tiny/{run.name}" in done.err
        assert whole(run / "checkpoints" / "step-000002")
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"], (
            "nothing half-written is left"
        )
        assert (run.parent / "latest").read_text().strip() == run.name


def test_a_disk_that_is_full_already(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path)
    with jobs.small_disk(tmp_path / "runs", "size=64k") as disk:
        (disk / "ballast").write_bytes(bytes(60 << 10))
        done = unisono(place, "train", "recipe.toml", "--json")
        assert done.code == done.object["exit"] == 2 and done.left == ()
        assert done.block.startswith("error U-O01  cannot write into the run folder: No space left on device")
        assert [path.name for path in disk.iterdir()] == ["ballast"]


def test_a_disk_that_fills_up_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Nothing is saved before the end, so it is the lines of the metrics that find no room: they wait in memory."""
    place = jobs.folder_with(tmp_path)
    flags = ("--plan", "dp=2", "--train.save_every", "0", "--train.steps", "200")
    with jobs.small_disk(tmp_path / "runs", "size=48k"):
        done = unisono(place, "train", "recipe.toml", "--json", *flags)
        assert done.code == done.object["exit"] == 2 and done.left == (), done.err
        assert done.block.startswith(
            "error U-K02  checkpoint step-200 could not be written: No space left on"
        )
        assert "cannot write into the run folder: No space left on device; training goes on" in " ".join(
            done.err.split()
        )
        assert "Traceback" not in done.err
        (run,) = jobs.runs_of(place)
        assert not list(run.glob(".*")), "no half of an error.json"
        assert not (run.parent / "latest").exists(), "it holds nothing to go on from"


def whole(folder: Path) -> bool:
    from unisono.train.state.checkpoint import verify_folder

    return verify_folder(folder) == []
