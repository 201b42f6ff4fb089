"""`prediction.json`: written where the model can be priced, and never in a run's way."""

import json
from pathlib import Path

import pytest

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.planner import predict
from unisono.verbs.train.folder import PREDICTION, Watched
from unisono.verbs.train.room import expected

RECIPE = Recipe(
    model=ModelConfig(n_layer=4, n_head=2, d_model=32, context=16),
    train=TrainConfig(global_batch=8, micro_batch=2),
)


def told(recipe: Recipe, environ: dict[str, str], plan: str = "dp=2 pp=2") -> dict | None:
    got = resolve(recipe, plan)
    text = expected(got.recipe, got.plan, environ)
    return None if text is None else json.loads(text)


def test_a_prediction_says_from_where_it_is_and_how_right(tmp_path: Path) -> None:
    said = told(RECIPE, {"XDG_CACHE_HOME": str(tmp_path)})
    assert said is not None
    assert said["cluster"] == "laptop" and said["calibrated"] is False and said["error_pct"] > 0
    assert said["step_s"] == pytest.approx(sum(said["parts"].values())) and said["mem_mib"] > 0


def test_what_cannot_be_priced_has_none(tmp_path: Path) -> None:
    words = Recipe(data=DataConfig(tokenizer="char"), train=TrainConfig(global_batch=8, micro_batch=2))
    assert (
        told(words, {"XDG_CACHE_HOME": str(tmp_path)}, "dp=2") is None
    )  # how many there are, only the data knows


def test_a_damaged_calibration_and_a_price_that_fails_are_told_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "cluster.toml").write_text("= 3\n")
    said = told(RECIPE, environ)
    assert said is not None and "cluster.toml" in said["problem"]
    (tmp_path / "unisono" / "cluster.toml").unlink()

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no peak")

    monkeypatch.setattr(predict, "predict", fails)
    said = told(RECIPE, environ)
    assert said is not None and "no peak" in said["problem"]


def test_the_folder_holds_the_prediction_of_its_latest_beginning(tmp_path: Path) -> None:
    run = tmp_path / "name" / "id"
    run.mkdir(parents=True)
    for prediction in ('{"step_s": 1}', None):
        with Watched(True, "", run, prediction) as watched:
            assert (run / PREDICTION).exists() == (
                prediction is None
            )  # what was there until the ranks are ready
            watched.hear(-1, {"kind": "ready"})
        assert (run / PREDICTION).exists() == (prediction is not None)
