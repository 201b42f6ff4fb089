"""A run that gains nothing ends by itself, on all ranks alike, and its best checkpoint stays."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.train.small import recipe
from tests.train.test_session import play
from tests.train.watch import test_bad_steps as bad_steps
from unisono.config import Recipe, resolve, resolved_toml
from unisono.report.page import run as report
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.train import live
from unisono.train.export import checkpoint_of
from unisono.train.state.checkpoint.find import best, best_step, list_steps
from unisono_contrib.config.sections.early_stopping import EarlyStoppingConfig
from unisono_contrib.trackers.run_folder import tracked


def stopping(folder: Path, **keys: Any) -> Recipe:
    """Validates after each of nine steps, and keeps one checkpoint."""
    told = recipe(folder, steps=9, eval_every=1, eval_batches=1, save_every=1, keep=1)
    return told.model_copy(update={"early_stopping": EarlyStoppingConfig(**keys)})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("dp=2 pp=2", 4)])
def test_it_ends_after_so_many_validations_without_gain(tmp_path: Path, plan: str, ranks: int) -> None:
    told, run, heard = stopping(tmp_path, patience=2, min_delta=50.0), tmp_path / "run", list[str]()
    ends = play(told, plan, ranks, run, heard=heard)
    assert {(end["steps"], end["stopped"], end["early_stopped"]) for end in ends} == {(3, False, True)}
    assert any("was best at step 1, " in text and "in no 2 validations since" in text for text in heard)
    assert [*list_steps(run)] == [1, 3]  # the newest, and the best, which `keep` does not count
    assert best(run) == list_steps(run)[1] == checkpoint_of(run, "best") != checkpoint_of(run)


@pytest.mark.timeout(60)
def test_one_that_has_ended_stays_so_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    run, keys = tmp_path / "run", {"min_delta": 50.0}
    play(stopping(tmp_path, patience=2, **keys), "dp=1", 1, run)
    (again,) = play(stopping(tmp_path, patience=2, **keys), "dp=1", 1, run, resume=True)
    assert (again["steps"], again["early_stopped"]) == (3, True)
    (more,) = play(stopping(tmp_path, patience=4, **keys), "dp=1", 1, run, resume=True)
    assert (more["steps"], more["early_stopped"]) == (5, True)
    assert best(run) == list_steps(run)[1]


@pytest.mark.timeout(60)
def test_a_run_that_gains_goes_on_and_its_last_is_the_best(tmp_path: Path) -> None:
    (end,) = play(stopping(tmp_path, patience=1), "dp=1", 1, tmp_path / "run")
    values = [loss for _, loss in end["val"]]
    assert all(b < a for a, b in pairwise(values))
    assert (end["steps"], end["early_stopped"]) == (9, False)
    assert best(tmp_path / "run") == list_steps(tmp_path / "run")[9]


@pytest.mark.timeout(60)
def test_a_run_without_it_has_no_best(tmp_path: Path) -> None:
    play(recipe(tmp_path, steps=1), "dp=1", 1, tmp_path / "run")
    with pytest.raises(UsageError, match="no best checkpoint") as caught:
        checkpoint_of(tmp_path / "run", "best")
    assert caught.value.code == "F03"


def test_what_is_better() -> None:
    less, more = EarlyStoppingConfig(min_delta=0.5), EarlyStoppingConfig(mode="max")
    assert less.is_better(1.0, 1.6) and not less.is_better(1.0, 1.5) and not less.is_better(2.0, 1.0)
    assert more.is_better(1.1, 1.0) and not more.is_better(1.0, 1.0)
    assert less.is_better(9.0, math.nan) and not less.is_better(math.nan, math.nan)
    assert not less.is_better(math.nan, 1.0) and not more.is_better(math.nan, 1.0)


@pytest.mark.parametrize("train", [{"eval_every": 0}, {"eval_every": 1}])
def test_what_could_judge_nothing_is_refused(tmp_path: Path, train: dict[str, Any]) -> None:
    told = recipe(tmp_path, **train).model_copy(
        update={"early_stopping": EarlyStoppingConfig(metric="val_f1")}
    )
    with pytest.raises(ConfigProblems, match="val_f1" if train["eval_every"] else "eval_every = 0"):
        resolve(told, "dp=1")


@pytest.mark.timeout(60)
def test_a_run_that_is_put_back_forgets_the_best_of_steps_that_it_left(tmp_path: Path) -> None:
    """Step 6 is the best, and lies after the checkpoint to which the run goes back because of step 7."""
    told = bad_steps.recipe(
        on_bad="roll_back", skip_around=1, clip=0.0, eval_every=2, eval_batches=1, save_every=4
    )
    told = told.model_copy(update={"early_stopping": EarlyStoppingConfig(patience=0)})
    corpus, run, named = bad_steps.spoilt(told, {(7, 1): math.nan}), tmp_path / "run", list[int | None]()
    point, go_back = live.point_best, live.Live.go_back

    def left(here: Any, report: Any) -> bool:
        named.append(best_step(run))
        done = go_back(here, report)
        named.append(best_step(run))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.Live, "go_back", left)
        bad_steps.play(told, corpus, "dp=1", 1, run)
    assert named[0] == 6 and named[1] in (None, 2, 4)
    assert point is live.point_best and best(run) is not None


@pytest.mark.timeout(60)
def test_its_report_and_its_state_say_how_it_ended(tmp_path: Path) -> None:
    told, run = stopping(tmp_path, patience=2, min_delta=50.0), tmp_path / "demo" / "run"
    run.parent.mkdir()
    play(told, "dp=1", 1, run)
    (run / "config.resolved.toml").write_text(resolved_toml(resolve(told, "dp=1")))
    said = report(run)
    (value,) = (
        line["val_loss"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["step"] == 1
    )
    assert said["best"] == {"step": 1, "val_loss": value}
    assert said["early"].startswith("early stopping: val_loss was best at step 1, ")
    drawn = (run / "report.html").read_text()
    assert "best checkpoint" in drawn and "in no 2 validations since" in drawn
    assert tracked(run, 3).state == "done"
