"""Ranks that make other models of one recipe are told, instead of leaving each other in a collective; and a plain
module that is traced beside another one keeps its graph."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.foreign import UNet
from unisono.comm.members import Shape
from unisono.comm.mesh import Mesh
from unisono.config import ModelConfig
from unisono.launch.context import RankContext
from unisono.models.build import Facts, build
from unisono.observe.span import Recorder
from unisono.spec.errors import UsageError
from unisono.train.build.build import check_same
from unisono_contrib.models.traced import traced

FILE = Path(__file__).parents[2] / "models" / "foreign.py"


def made(name: str) -> torch.nn.Module:
    return build(
        ModelConfig.model_validate({"kind": f"{FILE}:{name}"}), Facts(classes=10, sample_shape=(1, 8, 8))
    )


def check(ctx: RankContext, models: list[torch.nn.Module]) -> None:
    mesh = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60))
    check_same(models[ctx.rank], mesh.world, torch.device("cpu"))


def test_a_rank_with_another_model_is_named(threads: Any) -> None:
    usual, odd = made("pair"), made("narrow")
    threads(check, 3, models=[usual] * 3)
    with pytest.raises(UsageError, match="rank 2 made another model") as caught:
        threads(check, 3, models=[usual, usual, odd])
    assert caught.value.code == "L05"


def test_modules_are_traced_one_at_a_time() -> None:
    """Torch keeps one state for a process while it traces: two at once would both come out as modules without a graph."""
    found: list[bool] = []

    def trace(module: torch.nn.Module) -> None:
        found.append(
            len(traced(module, torch.zeros(1, 1, 8, 8)).parameters) == len(list(module.parameters()))
        )

    tracing = [threading.Thread(target=trace, args=(UNet(),)) for _ in range(2)]
    for one in tracing:
        one.start()
    for one in tracing:
        one.join()
    assert found == [True] * 2
