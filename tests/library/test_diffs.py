"""Training scripts in the shape of nanoGPT's and torchtitan's need twelve new lines at most, and compute the same."""

import difflib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import World
from unisono.library.enter import ScriptStage, staged
from unisono.plan import Plan

DOORS = Path(__file__).parents[2] / "examples" / "doors"
SHAPES = ("nanogpt", "titan")


def play(ctx: Any, script: str, plan: str, folder: str) -> dict[str, Any]:
    """Run a script as it is, in float64; its losses, and the weights with which it ends."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path.insert(0, str(DOORS))
    path = DOORS / f"{script}.py"
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    with staged(ScriptStage(Plan.parse(plan), ctx)):
        exec(compile(path.read_text(), str(path), "exec"), space)
    end = vars(space["trainer"]) if "trainer" in space else space
    weights = end["job"].weights() if "job" in end else end["model"].state_dict()
    flat = {name: weight.flatten().tolist() for name, weight in weights.items()}
    return {"history": end["history"], "weights": flat}


@pytest.mark.parametrize("shape", SHAPES)
def test_twelve_new_lines_at_most(shape: str) -> None:
    before, after = ((DOORS / f"{shape}_{name}.py").read_text().splitlines() for name in ("before", "after"))
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(new) <= 12, new


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", SHAPES)
def test_several_ranks_compute_what_the_script_computed_before(
    world: World, shape: str, tmp_path: Path
) -> None:
    """Losses of training and validation and the last weights, to rounding in float64."""
    (before,) = world(play, 1, group=False, script=f"{shape}_before", plan="dp=1", folder=str(tmp_path))
    assert len(before["history"]) >= 8 and before["history"][-1] < before["history"][0]
    for number, plan in (1, "dp=1"), (2, "dp=2"), (3, "dp=3"), (4, "dp=2 shard=2"):
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank in world(play, number, script=f"{shape}_after", plan=plan, folder=str(folder)):
            assert rank["history"] == pytest.approx(before["history"], abs=1e-9), plan
            assert rank["weights"].keys() == before["weights"].keys()
            for name, weight in rank["weights"].items():
                assert weight == pytest.approx(before["weights"][name], abs=1e-9), (plan, name)
        assert [*folder.glob("*/checkpoints/step-*")], "a checkpoint"
