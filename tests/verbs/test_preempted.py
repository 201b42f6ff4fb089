"""A scheduler asks for the end: within the grace the run is saved, also from within a step, and one command goes on."""

import os
import signal
from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import checkpoints, losses, started, unisono
from tests.verbs.test_by_others import TORCHRUN, by_hand
from unisono.train.state import history
from unisono.train.state.checkpoint import read_full

pytestmark = pytest.mark.timeout(150)

AUTO = ("train", "recipe.toml", "--resume", "auto", "--json")
SHORT = ("--launch.grace", "3")


STANDS = "open('stands', 'w').close(); os.read(os.pipe()[0], 1)  # for ever"


def standing(place: Path) -> Path:
    """A folder whose run stands still in its fourth step, and says so by a file."""
    jobs.folder_with(place, jobs.USERS, function="blocking")
    model = place / "model.py"
    model.write_text(model.read_text().replace("os.read(os.pipe()[0], 1)  # for ever", STANDS))
    return place


def unblocked(place: Path) -> Path:
    """From now on that step goes on."""
    model = place / "model.py"
    model.write_text(model.read_text().replace(STANDS, "return h"))
    return place


def same_bits(one: Path, other: Path) -> bool:
    tensors = [read_full(run / "checkpoints" / checkpoints(run)[-1]) for run in (one, other)]
    names = [set(found) for found in tensors]
    return names[0] == names[1] and all((tensors[0][name] == tensors[1][name]).all() for name in names[0])


def test_a_step_that_outlasts_the_grace_is_given_up_and_what_was_before_it_saved(tmp_path: Path) -> None:
    """Steps 1 to 3 are made, the fourth stands still; a checkpoint was due after the second. SIGUSR1 to one rank."""
    place = standing(tmp_path / "asked")
    with started(place, *AUTO, *SHORT, "--train.save_every", "2") as job:
        run = job.there("stands")
        os.kill(job.ranks()[1], signal.SIGUSR1)
        done = job.done()
    assert done.code == done.object["exit"] == 75 and done.left == ()
    assert done.block.splitlines() == [
        "error U-S01  stopped as asked, within a step; the run is saved as of step 3",
        f"  try     unisono train --resume runs/mine/{run.name} (from checkpoints/step-000003)",
    ]
    assert checkpoints(run) == ["step-000002", "step-000003"] and list(losses(run)) == [1, 2, 3]
    assert history.past(run).failures == 0
    unblocked(place)
    done = unisono(place, *AUTO)
    assert (done.code, done.object["resumed_from"], done.object["restarts"]) == (0, "step-000003", 1)
    other = unblocked(standing(tmp_path / "whole"))
    (other / "recipe.toml").write_text((place / "recipe.toml").read_text())  # a path is part of a recipe
    whole = unisono(other, *AUTO)
    assert losses(run) == losses(other / whole.object["run_dir"])
    assert same_bits(run, other / whole.object["run_dir"])


def test_where_steps_change_what_is_kept_the_newest_checkpoint_stands(tmp_path: Path) -> None:
    place = standing(tmp_path)
    with started(place, *AUTO, *SHORT, "--plan", "dp=2 sync=period:2", "--train.save_every", "2") as job:
        run = job.there("stands")
        job.process.send_signal(signal.SIGTERM)
        done = job.done()
    assert done.code == 75 and done.left == ()
    assert "the policy's own state changes within a step" in done.err
    assert done.block.splitlines()[0].endswith("the grace of 3 s (launch.grace) is over")
    assert "(from checkpoints/step-000002)" in done.block
    assert checkpoints(run) == ["step-000002"]


def test_one_rank_of_others_is_asked_and_all_save(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    with by_hand(place, *AUTO, "--train.steps", "100000") as ranks:
        run = ranks[0].steps(5)
        os.kill(ranks[1].process.pid, signal.SIGUSR1)
        done = [rank.done() for rank in ranks]
    assert [one.code for one in done] == [75, 75], done[0].err + done[1].err
    assert done[0].block.startswith("error U-S01  stopped as asked; the run is saved")
    assert checkpoints(run)[-1] == f"step-{len(losses(run)):06d}"
    with by_hand(place, *AUTO, "--train.steps", str(len(losses(run)) + 5)) as ranks:
        done = [rank.done() for rank in ranks]
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert jobs.runs_of(place) == [run] and done[0].object["restarts"] == 1
    with by_hand(place, *AUTO, "--train.steps", "5") as ranks:
        done = [rank.done() for rank in ranks]
    assert [one.code for one in done] == [0, 0] and "nothing to do: " in done[0].err


@pytest.mark.slow
def test_ranks_of_others_that_stand_still_save_within_the_grace_too(tmp_path: Path) -> None:
    place = standing(tmp_path)
    with by_hand(place, *AUTO, *SHORT, "--train.save_every", "2") as ranks:
        run = ranks[0].there("stands")
        os.kill(ranks[1].process.pid, signal.SIGTERM)
        done = [rank.done() for rank in ranks]
    assert [one.code for one in done] == [75, 75], done[0].err + done[1].err
    assert done[0].block.startswith(
        "error U-S01  stopped as asked, within a step; the run is saved as of step 3"
    )
    assert done[0].object["exit"] == 75 and checkpoints(run)[-1] == "step-000003"


@pytest.mark.slow
def test_torchrun_passes_it_on_and_starts_the_same_run_again(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    torchrun = ("--standalone", "--nproc-per-node=2", "-m", "unisono", *AUTO)
    with started(place, *torchrun, "--train.steps", "100000", module=TORCHRUN) as job:
        run = job.steps(5)
        job.process.send_signal(signal.SIGTERM)
        done = job.done()
    assert done.code != 0 and "error U-S01  stopped as asked; the run is saved" in done.err
    steps = len(losses(run))
    assert checkpoints(run)[-1] == f"step-{steps:06d}"
    done = unisono(place, *torchrun, "--train.steps", str(steps + 3), module=TORCHRUN)
    assert done.code == 0 and done.object["resumed_from"] == f"step-{steps:06d}"
    assert jobs.runs_of(place) == [run]


def test_checkpoints_come_as_often_as_is_worth_it(tmp_path: Path) -> None:
    """The first after ten steps, to see what it takes; with a failure every few seconds soon another."""
    place = jobs.folder_with(tmp_path, jobs.USERS, function="good")
    done = unisono(
        place, "train", "recipe.toml", "--train.save_every", "auto", "--train.steps", "60",
        "--launch.mtbf_hours", "1e-6",
    )  # fmt: skip
    assert done.code == 0, done.err
    (run,) = jobs.runs_of(place)
    told = [line for line in done.err.splitlines() if "a checkpoint every" in line]
    assert told and "none seen: launch.mtbf_hours" in told[0] and "in Daly's higher order" in told[0]
    assert len(checkpoints(run)) == 3, "more than the last, of which three are kept"
