"""A parameter that ranks share has a gradient for all of them or for none."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.threads import prove
from unisono.comm.members import Shape
from unisono.comm.mesh import Mesh
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono_contrib.sync._presence import GradientPresence

pytestmark = pytest.mark.timeout(120)


def nonzero(ctx: Any, held: list[dict[str, list[float]]]) -> set[str]:
    """What the ranks of one replica agree on. held: by rank, what it has of each parameter."""
    mine = {name: torch.tensor(values) for name, values in held[ctx.rank].items()}
    mesh = Mesh(Shape(shard=len(held)), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60))
    return set(GradientPresence.among(mine, mesh.replica, torch.empty(0)).nonzero(mine))


def test_ranks_agree_on_what_they_share_and_keep_what_they_have_alone(threads) -> None:
    held = [
        {"shared": [0.0, 0.0], "none": [0.0], "first": [1.0]},
        {"shared": [0.0, 2.0], "none": [0.0]},
        {},
    ]
    assert threads(nonzero, 3, held=held) == [{"shared", "first"}, {"shared"}, set()]


def test_one_rank_needs_nobody() -> None:
    here = GradientPresence.among(["w", "z"], None, torch.empty(0))
    assert here.nonzero({"w": torch.ones(2), "z": torch.zeros(2)}) == {"w"}
    assert here.nonzero({}) == set()


@pytest.mark.parametrize("plan", ["shard=2", "tp=2", "dp=2 shard=2"])
def test_rows_of_bytes_that_do_not_come_decay_as_the_others(tmp_path: Path, plan: str) -> None:
    """A rank holds the rows of bytes from 128 on, whose gradient is zero: its part of the weight decays all the same."""
    text = tmp_path / "text.txt"
    text.write_text("all parts sound as one. " * 100)
    recipe = Recipe(
        model=ModelConfig(n_layer=1, n_head=2, d_model=8, context=8, tie_embeddings=False),
        train=TrainConfig(steps=8, global_batch=4, micro_batch=1, dtype="float64", weight_decay=0.5),
        data=DataConfig(source=f"text:{text}"),
    )
    (proof,) = prove(recipe, [Plan.parse(f"{plan} sync=delayed precision=fp64")], 3)
    assert proof.passed, proof.first_divergence
