"""`--resume auto`: one command for a scheduler that starts it again and again."""

import json
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import unisono
from unisono.config import OutConfig, Recipe, TrainConfig
from unisono.spec.runs import CONFIG
from unisono.verbs.train.folder import newest

pytestmark = pytest.mark.timeout(150)


def made(place: Path, name: str, *, steps: int = -1, kept: bool = False) -> Path:
    """A run folder; steps: that it has made, if it has ended. kept: whether it has a checkpoint."""
    run = place / "mine" / name
    run.mkdir(parents=True)
    (run / CONFIG).touch()
    (run / "env.json").touch()
    if steps >= 0:
        (run / "summary.json").write_text(json.dumps({"steps": steps}))
    if kept:
        (run / "checkpoints" / "step-000003").mkdir(parents=True)
        (run / "checkpoints" / "step-000003" / "manifest.json").touch()
    return run


def of(place: Path) -> tuple[Path | None, bool]:
    found = newest(Recipe(name="mine", train=TrainConfig(steps=9), out=OutConfig(dir=str(place))))
    return found.run_dir, found.done is not None


def test_which_run_is_gone_on_with(tmp_path: Path) -> None:
    assert of(tmp_path) == (None, False), "none: a new one"
    old = made(tmp_path, "20260101-000000-aaaa", kept=True)
    assert of(tmp_path) == (old, False)
    bare = made(tmp_path, "20260102-000000-aaaa")
    assert of(tmp_path) == (old, False), "the newest has nothing to go on from, and this one has"
    (bare / "summary.json").write_text(json.dumps({"steps": 4}))
    assert of(tmp_path) == (old, False), "it has more steps to make"
    ended = made(tmp_path, "20260103-000000-aaaa", steps=9)
    assert of(tmp_path) == (ended, True)
    later = made(tmp_path, "20260104-000000-aaaa")
    assert of(tmp_path) == (later, False), "what lies behind a finished run is left alone"
    (tmp_path / "mine" / "20260105-000000-aaaa").mkdir()
    assert of(tmp_path) == (later, False), "no run, but a folder"


def test_one_command_makes_one_run_however_often_it_is_given(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    argv = ("train", "recipe.toml", "--resume", "auto", "--json")
    whole = unisono(place, *argv)
    assert (whole.code, whole.object["restarts"], whole.object["resumed_from"]) == (0, 0, None)
    again = unisono(place, *argv, environ={"SLURM_RESTART_COUNT": "2"})
    assert again.code == 0 and again.object == whole.object
    assert "nothing to do: runs/mine/" in again.err
    on = unisono(place, *argv, "--train.steps", "15", environ={"SLURM_RESTART_COUNT": "2"})
    assert on.object["run_dir"] == whole.object["run_dir"] and on.object["resumed_from"] == "step-000012"
    assert "note  Slurm has started this job again 2 times" in on.err and on.object["restarts"] == 2
    (run,) = jobs.runs_of(place)
    assert list(jobs.losses(run)) == list(range(1, 16))


def test_a_run_without_a_checkpoint_begins_anew_in_its_own_folder(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="raising")
    argv = ("train", "recipe.toml", "--resume", "auto", "--train.save_every", "0", "--json")
    assert unisono(place, *argv).code == 1
    (run,) = jobs.runs_of(place)
    model = place / "model.py"
    model.write_text(model.read_text().replace("raise ValueError", "return h; raise ValueError"))
    done = unisono(place, *argv)
    assert done.code == 0 and jobs.runs_of(place) == [run] and done.object["restarts"] == 1
    assert list(jobs.losses(run)) == list(range(1, 13))


def test_auto_needs_a_recipe(tmp_path: Path) -> None:
    done = unisono(tmp_path, "train", "--resume", "auto")
    assert done.code == 2 and done.block.startswith(
        "error U-C04  --resume auto looks for a run of a recipe's name"
    )
