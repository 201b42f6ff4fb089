"""A Lightning Trainer under a plan trains, goes on and is proven as Lightning alone on one process."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.ranks import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]


@pytest.fixture(scope="module")
def loops() -> Any:
    """Imported when it is needed: the library takes seconds."""
    return import_module("tests.library.lightning_loops")


CASES: dict[str, dict[str, Any]] = {
    "classifier": {"gradient_clip_val": 0.5},
    "part": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "adversaries": {"validate": False},
}


def compare(got: list[dict[str, Any]], want: dict[str, Any]) -> None:
    for rank in got:
        assert rank["steps"] == want["steps"]
        assert rank["losses"] == pytest.approx(want["losses"], abs=1e-7)  # Lightning logs in float32
        assert rank["metrics"] == pytest.approx(want["metrics"], abs=1e-6)
        assert rank["weights"].keys() == want["weights"].keys()
        for name, values in want["weights"].items():
            assert rank["weights"][name] == pytest.approx(values, abs=1e-10), name
        for a, b in zip(rank["tested"], want["tested"], strict=True):
            assert a == pytest.approx(b, abs=1e-6)


@pytest.mark.parametrize(("kind", "plan"), [(kind, plan) for kind in CASES for plan in ("dp=2", "shard=2")
                                            if (kind, plan) != ("adversaries", "shard=2")])  # fmt: skip
def test_it_trains_as_lightning_alone(loops: Any, world: World, tmp_path: Path, kind: str, plan: str) -> None:
    case = CASES[kind]
    (want,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "one"), kind=kind, **case)
    got = world(loops.on_ranks, 2, group=False, plan=plan, folder=str(tmp_path / "two"), kind=kind, **case)
    compare(got, want)


@pytest.mark.parametrize("plan", ["dp=2", "shard=2"])
def test_it_goes_on_under_another_plan(loops: Any, world: World, tmp_path: Path, plan: str) -> None:
    """Three passes at once; one alone, one under the plan, one alone again."""
    (want,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "whole"), epochs=3)
    folder = str(tmp_path / "parts")
    (first,) = world(loops.alone, 1, group=False, folder=folder, epochs=1)
    second = world(loops.on_ranks, 2, group=False, plan=plan, folder=folder, epochs=2, resume=True)
    (third,) = world(loops.alone, 1, group=False, folder=folder, epochs=3, resume=True)
    (again,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "again"), epochs=1)
    (again,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "again"), epochs=2, resume=True)
    compare(second, again)
    (again,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "again"), epochs=3, resume=True)
    compare([third], again)
    assert first["steps"] * 3 == third["steps"] == want["steps"]


@pytest.mark.parametrize("plan", ["dp=2", "shard=2"])
def test_it_is_proven_by_one_call(loops: Any, plan: str) -> None:
    verdict = unisono.prove(loops.loop, plan)
    assert verdict and len(verdict.errors) == 3, str(verdict)


@pytest.mark.parametrize(("change", "code"), [("by hand", "J21"), ("gathered", "J21")])
def test_what_would_not_be_the_same_is_refused(
    loops: Any, world: World, tmp_path: Path, change: str, code: str
) -> None:
    case = {"by hand": ("adversaries", "shard=2"), "gathered": ("gathered", "dp=2")}[change]
    with pytest.raises(unisono.UnisonoError) as raised:
        world(
            loops.on_ranks, 2, group=False, plan=case[1], folder=str(tmp_path), kind=case[0], validate=False
        )
    assert raised.value.code == code and raised.value.fix
