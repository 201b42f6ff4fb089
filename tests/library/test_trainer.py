"""transformers.Trainer under a plan trains, evaluates, goes on and is proven as it does alone on one process."""

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
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.fixture(scope="module")
def loops() -> Any:
    """Imported when it is needed: the library takes seconds."""
    return import_module("tests.library.trainer_loops")


CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0},
    "bert": {"gradient_accumulation_steps": 2, "save_strategy": "epoch", "load_best_model_at_end": True},
    "adapters": {"save_strategy": "no"},
}


def compare(got: list[dict[str, Any]], want: dict[str, Any]) -> None:
    for rank in got:
        assert len(rank["log"]) == len(want["log"])
        for a, b in zip(rank["log"], want["log"], strict=True):
            assert a == pytest.approx(b, abs=2e-6), b
        assert rank["weights"].keys() == want["weights"].keys()
        for name, values in want["weights"].items():
            assert rank["weights"][name] == pytest.approx(values, abs=1e-7), name
        assert rank["config"] == want["config"]


@pytest.mark.parametrize("plan", ["dp=2", "shard=2"])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_trainer_alone(
    loops: Any, world: World, tmp_path: Path, name: str, plan: str
) -> None:
    case = {"name": name, **CASES[name]}
    (want,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "one"), **case)
    compare(world(loops.on_ranks, 2, group=False, plan=plan, folder=str(tmp_path / "two"), **case), want)


@pytest.mark.parametrize("plan", ["dp=2", "shard=2"])
def test_it_goes_on_in_the_middle_of_a_pass(loops: Any, world: World, tmp_path: Path, plan: str) -> None:
    """From step 4 of 6 a pass: what one process saved, and what the ranks saved."""
    (want,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "one"))
    for folder in ("one", "two"):
        saved = str(tmp_path / folder / "checkpoint-4")
        got = world(loops.on_ranks, 2, group=False, plan=plan, folder=str(tmp_path / "two"), resume=saved)
        compare(got, want)
        if folder == "one":
            got = world(loops.on_ranks, 2, group=False, plan=plan, folder=str(tmp_path / "two"))
    (back,) = world(loops.alone, 1, group=False, folder=str(tmp_path / "one"),
                    resume=str(tmp_path / "two" / "checkpoint-4"))  # fmt: skip
    compare([back], want)


@pytest.mark.parametrize("plan", ["dp=2", "shard=2"])
def test_it_is_proven_by_one_call(loops: Any, plan: str) -> None:
    verdict = unisono.prove(loops.loop, plan)
    assert verdict and len(verdict.errors) == 3, str(verdict)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(unisono.UnisonoError) as raised:
        unisono.trainer(dict)
    assert raised.value.code == "J24" and raised.value.fix
