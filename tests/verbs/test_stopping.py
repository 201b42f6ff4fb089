"""Ctrl-C, SIGTERM and the death of one rank: what is promised is kept, and nobody stays behind."""

import os
import signal
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import checkpoints, losses, started, unisono

pytestmark = pytest.mark.timeout(150)


def test_asked_to_stop_it_saves_and_goes_on_later(tmp_path: Path) -> None:
    """Ctrl-C, then resumed and SIGTERM, then resumed to the end: the same losses as in one go, in one run folder."""
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    more = ("--train.steps", "40")
    with started(place, "train", "recipe.toml", *more) as job:
        run = job.steps(5)
        job.process.send_signal(signal.SIGINT)
        done = job.done()
    assert done.code == 130 and done.left == ()
    made = len(losses(run))
    assert 5 <= made < 40
    assert checkpoints(run)[-1] == f"step-{made:06d}", "the step was finished, and saved"
    name = f"runs/mine/{run.name}"
    assert done.block.splitlines() == [
        "error U-S02  stopped as asked; the run is saved",
        f"  try     unisono train --resume {name}",
    ]
    assert jobs.error_of(run)["exit"] == 130

    with started(place, "train", "--resume", name, "--json") as job:
        job.steps(made + 3)
        job.process.send_signal(signal.SIGTERM)
        done = job.done()
    assert done.code == done.object["exit"] == 75 and done.left == ()
    assert done.block.startswith("error U-S01  stopped as asked; the run is saved\n")
    assert jobs.error_of(run) == done.object, "the newer end is the one that is told"

    done = unisono(place, "train", "--resume", name, "--json")
    assert done.code == 0 and done.object["run_dir"] == name
    assert not (run / "error.json").exists(), "it went well in the end"
    assert jobs.runs_of(place) == [run]

    whole = unisono(place, "train", "recipe.toml", "--json", *more)
    assert losses(run) == losses(place / whole.object["run_dir"])


def test_a_second_ctrl_c_stops_now(tmp_path: Path) -> None:
    """The step hangs for ever, so the first one cannot be obeyed."""
    place = jobs.folder_with(tmp_path, jobs.USERS, function="blocking")
    with started(place, "train", "recipe.toml", "--json") as job:
        run = job.kept("step-000003")
        job.process.send_signal(signal.SIGINT)
        job.hear("stopping after this step")
        job.process.send_signal(signal.SIGINT)
        done = job.done()
    assert done.code == done.object["exit"] == 130 and done.left == ()
    assert done.block.startswith("error U-S02  stopped at once")
    assert f"unisono train --resume runs/mine/{run.name} (from checkpoints/step-000003)" in done.block
    assert checkpoints(run) == ["step-000003"]


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="blocking")
    with started(place, "train", "recipe.toml", "--json", "--launch.recover", "false") as job:
        run = job.kept("step-000003")
        family = {job.process.pid, *(one.pid for one in job.family())}
        assert len(family) == 4 and {*jobs.marked(job.mark)} == family, "who stays behind would be found"
        os.kill(job.ranks()[1], signal.SIGKILL)
        done = job.done()
    assert done.code == done.object["exit"] == 137 and done.left == ()
    assert done.block.startswith("error U-R02  killed by SIGKILL, rank 1, host ")
    assert "Traceback" not in done.err
    assert jobs.error_of(run) == done.object
    assert checkpoints(run) == ["step-000003"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow)]
)
def test_stopped_before_the_first_step_nothing_was_made(tmp_path: Path, number: int, code: int) -> None:
    place = jobs.folder_with(tmp_path)
    with started(place, "train", "recipe.toml", "--json", program=jobs.UNISONO) as job:
        job.hear("importing torch")
        job.made()
        job.process.send_signal(number)
        done = job.done()
    assert done.code == done.object["exit"] == code and done.left == ()
    assert "Traceback" not in done.err and len(done.blocks) == 1
    assert jobs.runs_of(place) == []


def test_until_a_step_it_validates_saves_and_goes_on_later_with_the_same_bits(tmp_path: Path) -> None:
    """What stops by itself keeps the schedule of all steps."""
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    part = unisono(place, "train", "recipe.toml", "--until", "5", "--json")
    assert part.code == 0 and part.object["steps"] == 5 and part.object["val_loss"] is not None
    run = place / part.object["run_dir"]
    assert checkpoints(run)[-1] == "step-000005"
    rest = unisono(place, "train", "recipe.toml", "--resume", "auto", "--json")
    assert rest.object["steps"] == 12 and jobs.runs_of(place) == [run]
    whole = unisono(place, "train", "recipe.toml", "--json")
    assert losses(run) == losses(place / whole.object["run_dir"])
    wrong = unisono(place, "train", "recipe.toml", "--until", "0")
    assert wrong.code == 2 and wrong.block.startswith("error U-C02  --until 0 is no step")
