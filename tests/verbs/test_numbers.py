"""A loss that is no number stops the run, with the step, the rank and the layer; the last good checkpoint stays."""

from pathlib import Path

import pytest

from tests.verbs import jobs
from tests.verbs.jobs import Done, checkpoints, unisono

pytestmark = pytest.mark.timeout(120)


def check(done: Done, place: Path) -> tuple[dict, Path]:
    """What holds wherever the number came from."""
    said = done.object
    (run,) = jobs.runs_of(place)
    assert done.code == said["exit"] == 1 and said["code"] == "U-N01" and done.left == ()
    assert done.block.startswith("error U-N01  step ") and "Traceback" not in done.err
    assert jobs.error_of(run) == said
    kept = checkpoints(run)[-1]
    assert f"checkpoints/{kept} is kept" in said["try"]
    assert int(kept.removeprefix("step-")) <= int(said["what"].split()[1].rstrip(":")), (
        "saved while all was well"
    )
    return said, run


def test_a_learning_rate_far_too_high(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path)
    flags = (
        "--train.lr",
        "1e30",
        "--train.clip",
        "0",
        "--train.save_every",
        "1",
        "--train.lr_schedule",
        "constant",
    )
    said, run = check(unisono(place, "train", "recipe.toml", "--json", *flags), place)
    assert "learning rate" in said["likely"] and "--train.lr" in said["try"]
    assert said["where"].startswith("first in ")
    assert said["rank"] in range(4)
    assert str(run) not in said["what"]


def test_infinity_from_a_users_layer(tmp_path: Path) -> None:
    place = jobs.folder_with(tmp_path, jobs.USERS, function="bursting")
    said, run = check(unisono(place, "train", "recipe.toml", "--json"), place)
    assert said["what"].startswith("step 5: the loss is nan")
    assert (said["rank"], said["where"]) == (1, "first in stem.module.mistake (Burst)")
    assert checkpoints(run) == ["step-000003"]
