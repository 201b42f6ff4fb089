"""The tables of `benchmarks/quality.py` and `benchmarks/end_to_end.py`, as functions of numbers."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quality() -> Any:
    return loaded("quality")


@pytest.fixture(scope="module")
def end_to_end() -> Any:
    return loaded("end_to_end")


def runs(way: str, *losses: float, nbytes: float = 100.0) -> list[dict[str, Any]]:
    return [
        {"way": way, "seed": seed, "steps": 9, "loss": loss, "payload_bytes_step": nbytes}
        for seed, loss in enumerate(losses)
    ]


def test_noise_is_twice_the_standard_error_of_the_difference(quality: Any) -> None:
    fp32 = runs("plain", 1.0, 1.1, 1.2)
    near, far = runs("int8", 1.05, 1.15, 1.25, nbytes=25.0), runs("int4+ef", 1.5, 1.6, 1.7)
    _, close, off = quality.table_of([*fp32, *near, *far])
    assert close["noise"] == pytest.approx(2 * math.sqrt(2 * 0.01 / 3))
    assert close["more"] == pytest.approx(0.05)
    assert close["payload_ratio"] == pytest.approx(0.25)
    assert (close["met"], off["met"]) == (True, False)
    lines = quality.lines_of([close, off])
    assert "within yes" in lines[1]
    assert "beyond NO" in lines[2]


def test_seeds_are_compared_in_pairs_and_one_alone_says_nothing(quality: Any) -> None:
    fp32 = runs("plain", 1.0, 2.0)
    (row,) = [row for row in quality.table_of([*fp32, *runs("int8", 1.1)]) if row["way"] == "int8"]
    assert row["more"] == pytest.approx(0.1)
    assert row["within_noise"] is None
    assert row["met"] is None


def test_a_codec_stands_beside_its_own_optimiser(quality: Any) -> None:
    rows = quality.table_of(
        [*runs("plain", 1.0, 1.1), *runs("plain@sgd", 2.0, 2.1), *runs("sign+ef@sgd", 2.0, 2.1)]
    )
    assert rows[-1]["more"] == 0.0
    assert quality.recipe_of("sign+ef@sgd", 1, 960).train.optimizer == "sgd"


def test_what_quality_asks_for_is_there_or_named(quality: Any) -> None:
    found, missing = quality.there(quality.WAYS)
    assert set(found) >= {"plain", "one device", *quality.ASKED}
    assert quality.there(["plain@nobody", "nobody"])[1].keys() == {"plain@nobody", "nobody"}
    assert not missing


def played(way: str, took: list[float], points: list[tuple[int, float]], **more: Any) -> dict[str, Any]:
    return {
        "way": way, "steps": len(took), "whole": True, "took": took, "points": points, "load": 0.0,
        "device_bytes": 10.0 * len(took), "payload_bytes": None, **more,
    }  # fmt: skip


def test_the_time_to_a_loss_is_that_of_the_first_look_at_it(end_to_end: Any) -> None:
    ddp = played("DDP fp32", [2.0] * 10, [(5, 3.0), (10, 2.0)])
    codec = played("int4+ef", [0.5] * 12, [(4, 2.5), (8, 2.0), (12, 1.9)])
    slow = played("int8", [0.5] * 10, [(5, 2.5), (10, 2.1)])
    short = played("plain", [2.0] * 3, [(3, 4.0)], whole=False)
    rows = end_to_end.rows_of([ddp, codec, slow, short])
    assert rows[0]["seconds_to_it"] == 20.0
    assert rows[1]["seconds_to_it"] == 4.0
    assert rows[1]["sooner"] == 5.0
    assert rows[1]["device_bytes_to_it"] == 80.0
    assert rows[2]["sooner"] is None
    assert rows[3]["seconds_to_it"] is None
    lines = end_to_end.lines_of(rows)
    assert "5.00 yes" in lines[2]
    assert "never NO" in lines[3]


def test_a_codec_may_have_steps_of_its_own(end_to_end: Any) -> None:
    class Options:
        steps, whole, beside = 100, ["int4+ef@1.2", "int8"], ["plain"]

    assert end_to_end.asked(Options) == [
        ("DDP fp32", 100, 100), ("int4+ef", 120, 120), ("int8", 100, 100), ("plain", 100, 30),
    ]  # fmt: skip
