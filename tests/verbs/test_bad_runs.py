"""Mistakes that ranks find: every row of the table of bad runs, a sample of them in `make test`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verbs import bad_runs
from tests.verbs.bad_runs import PLAYED, SOME, BadRun, Place
from tests.verbs.jobs import losses
from unisono.train.state.checkpoint import verify_folder

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with bad_runs.place() as made:
        yield made


def marked(bad: BadRun) -> object:
    return pytest.param(bad, id=bad.name, marks=[] if bad.name in SOME else [pytest.mark.slow])


@pytest.mark.parametrize("bad", [marked(bad) for bad in PLAYED])
def test_answered(bad: BadRun, place: Place) -> None:
    answer, problems = place.play(bad)
    assert problems == [], answer.err


def test_a_run_folder_has_one_writer(place: Place) -> None:
    run = place.finished_copy()
    with bad_runs.held(run):
        answer = place.call("train", "--resume", run, "--train.steps", "6")
    assert answer.code == 2 and answer.row("").startswith("error U-O02  another run writes into this folder")
    assert (answer.row("where"), answer.left) == (run, ())
    assert place.call("train", "--resume", run, "--train.steps", "6").code == 0
    assert sorted(path.name for path in Path(run, "checkpoints").iterdir())[-1] == "step-000006"


def test_from_an_older_checkpoint_the_same_steps_are_made_again(place: Place) -> None:
    """One that is named is gone on from, also where the run had ended; its later lines are made anew."""
    run = place.finished_copy()
    made = losses(Path(run))
    (Path(run) / "checkpoints/step-000004/manifest.json").write_text("torn")
    answer = place.call("train", "--resume", f"{run}/checkpoints/step-000002", "--json")
    assert answer.code == 0 and losses(Path(run)) == made
    assert json.loads(answer.out)["resumed_from"] == "step-000002"
    assert verify_folder(Path(run, "checkpoints/step-000004")) == []


def test_a_report_says_what_it_could_not_read(place: Place) -> None:
    run = place.finished_copy()
    with Path(run, "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 5, "lo')
    answer = place.call("report", run)
    assert answer.code == 0 and "note  metrics.jsonl has 1 damaged line, left out\n" in answer.err


def test_names_are_unique() -> None:
    assert len({bad.name for bad in PLAYED}) == len(PLAYED) and set(SOME) <= {bad.name for bad in PLAYED}
