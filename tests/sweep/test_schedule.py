"""The loop of a sweep: retries, room, refusals, and what it leaves."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.sweep.fake import LR, FakePlace, bowl, searched, spec_in
from unisono import config
from unisono.spec.errors import ConfigProblems, UsageError
from unisono_contrib.sweep import journal, page, result
from unisono_contrib.sweep.progress import State
from unisono_contrib.sweep.room import Need, TrialRoom, free_gpus
from unisono_contrib.sweep.trial import RECIPE, PieceOutcome

LOST = PieceOutcome(why="killed by SIGKILL", again=True)
WRONG = PieceOutcome(why="no memory", again=False)


def test_a_failed_trial_is_tried_again_and_the_others_end(tmp_path: Path) -> None:
    place = FakePlace(
        bowl, {(1, 1): LOST, (1, 2): LOST, (3, 1): WRONG, **{(4, n): LOST for n in range(1, 9)}}
    )
    progress = searched(spec_in(tmp_path, "trials = 6\nretries = 2"), tmp_path / "out", place)
    assert [t.state for t in progress.trials] == [
        State.DONE, State.DONE, State.DONE, State.FAILED, State.FAILED, State.DONE,
    ]  # fmt: skip
    assert [t.failures for t in progress.trials] == [0, 2, 0, 1, 3, 0]
    assert progress.trials[3].why == "no memory"


def test_values_that_do_not_go_together_fail_their_trial_alone(tmp_path: Path) -> None:
    space = '"train.global_batch" = [8, 6]\nplan = ["dp=1", "dp=4"]'
    progress = searched(
        spec_in(tmp_path, 'method = "grid"', space), tmp_path / "out", FakePlace(lambda r, step: 1.0)
    )
    states = {(t.params["train.global_batch"], t.params["plan"]): t.state for t in progress.trials}
    assert states.pop((6, "dp=4")) is State.FAILED and {*states.values()} == {State.DONE}


@pytest.mark.parametrize(
    ("room", "at_once"),
    [(TrialRoom(2, 1e15), 1), (TrialRoom(4, 1e15), 2), (TrialRoom(64, 1.2e9), 1), (TrialRoom(64, 1e15), 4)],
)
def test_no_more_trials_train_than_there_is_room_for(tmp_path: Path, room: TrialRoom, at_once: int) -> None:
    """Each has two ranks, and so takes two cores and 0.6 GB beside what the ledger counts."""
    place = FakePlace(bowl)
    spec = spec_in(tmp_path, "trials = 5\nworkers = 4", f'{LR}\nplan = ["dp=2"]')
    progress = searched(spec, tmp_path / "out", place, workers=4, room=room)
    assert place.together == at_once and all(t.state is State.DONE for t in progress.trials)


def test_gpus_are_lent_to_one_trial_at_a_time() -> None:
    room = TrialRoom(1, 1e12, ("0", "1", "3"))
    assert free_gpus(room, ("1",), 2) == ("0", "3")
    assert room.why_not(Need(1, 0, 2), [Need(1, 0, 2)]) == "GPUs" and not room.why_not(
        Need(9, 0, 1), [Need(9, 0, 2)]
    )


def test_the_recipe_of_a_trial_has_its_values_and_the_best_is_written_out(tmp_path: Path) -> None:
    space = f'{LR}\n"train.betas" = [[0.9, 0.99], [0.8, 0.9]]\n"train.clip" = {{low = 0, high = 3}}'
    spec = spec_in(tmp_path, "trials = 7", space)
    progress = searched(spec, tmp_path / "out", FakePlace(bowl))
    for trial in progress.trials:
        recipe = config.load(tmp_path / "out" / trial.name / RECIPE).recipe
        assert recipe.train.lr == trial.params["train.lr"] and recipe.name == trial.name
        assert [*recipe.train.betas] == trial.params["train.betas"] and recipe.train.clip in (0, 1, 2, 3)  # type: ignore[attr-defined]
    best, conclusion = progress.best, spec.method.conclude(progress)
    file = result.write_best(spec, tmp_path / "out", conclusion)
    assert best is not None and file is not None
    loaded = config.load(file).recipe
    assert loaded.train.lr == best.params["train.lr"] and loaded.name == "base" and loaded.out.dir == "runs"
    lines = journal.lines(tmp_path / "out")
    facts = result.facts(spec, tmp_path / "out", progress, lines, conclusion)
    assert json.loads(json.dumps(facts))["best"]["trial"] == best.number and facts["steps"] == 7 * 64
    assert len(result.said(progress, "val_loss")) == 8
    files = page.write(progress, lines, facts, tmp_path / "out")
    assert [path.name for path in files] == ["sweep.html", "sweep.png"] and f"{best.value:.4g}" in files[
        0
    ].read_text()


def test_trials_that_share_cores_share_threads(tmp_path: Path) -> None:
    searched(
        spec_in(tmp_path, "trials = 2"), tmp_path / "out", FakePlace(bowl), workers=2, room=TrialRoom(8, 1e15)
    )
    recipe = tomllib.loads((tmp_path / "out" / "trial-000" / RECIPE).read_text())
    assert recipe["launch"]["threads_per_rank"] == 4


def test_another_sweep_in_the_same_folder_is_refused_and_more_trials_are_not(tmp_path: Path) -> None:
    journal.held_to(tmp_path, spec_in(tmp_path, "trials = 4").identity())
    journal.held_to(tmp_path, spec_in(tmp_path, "trials = 9\nworkers = 1\nretries = 0").identity())
    with pytest.raises(UsageError, match="holds another sweep: base differ") as caught:
        journal.held_to(tmp_path, spec_in(tmp_path, "trials = 4", steps=65).identity())
    assert caught.value.code == "C06"
    with journal.locked(tmp_path), pytest.raises(UsageError, match="another sweep is at work"):
        with journal.locked(tmp_path):
            pass


def test_options_of_a_method_that_the_command_line_replaces_mean_nothing(tmp_path: Path) -> None:
    assert spec_in(tmp_path, 'method = "asha"\neta = 3', method="random", trials=5).config.trials == 5
    assert spec_in(tmp_path, 'method = "asha"\neta = 3', method="asha").method.model_dump()["eta"] == 3


@pytest.mark.parametrize(
    ("said", "space", "problem"),
    [
        ('method = "ahsa"', LR, "did you mean asha"),
        ("trails = 4", LR, "unknown key sweep.trails"),
        ("trials = 0", LR, "sweep.trials"),
        ('method = "asha"\neta = 1', LR, "eta"),
        ("", '"train.lrr" = [1.0]', "did you mean train.lr"),
        ("", '"train.lr" = {low = 2.0, high = 1.0}', "should be below"),
        ("", '"train.lr" = {low = 0.0, high = 1.0, log = true}', "has no logarithm"),
        ("", '"train.lr" = {low = 0.1, hihg = 1.0}', "hihg"),
        ("", '"train.lr" = []', "the list is empty"),
        ("", "", "nothing to search"),
        ("", '"train.lr" = ["fast"]', "train.lr"),
        ('method = "grid"', LR, "points"),
        ('method = "asha"', '"train.steps" = [1, 2]', "equal steps"),
        ('method = "pbt"', '"train.global_batch" = [8, 16]', "must stay"),
        ('method = "pbt"\ntrials = 1', LR, "two members"),
    ],
)
def test_what_cannot_be_searched_is_refused_at_once(
    tmp_path: Path, said: str, space: str, problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        spec_in(tmp_path, said, space)
    problems = caught.value.problems if isinstance(caught.value, ConfigProblems) else [caught.value]
    assert any(problem in p.what for p in problems), [p.what for p in problems]
