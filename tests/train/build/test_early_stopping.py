"""A run that gains nothing ends by itself, on all ranks alike, and its best checkpoint stays."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.train.small import recipe
from tests.train.test_session import play
from unisono.config import Recipe, resolve
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.train.export import checkpoint_of
from unisono.train.state.checkpoint.find import best, list_steps
from unisono_contrib.config.sections.early_stopping import EarlyStoppingConfig


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
