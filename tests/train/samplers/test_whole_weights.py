"""Weights of any plan go out whole: all of its ranks gather the same tensors, which are those that one device has."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.launch.context import RankContext
from unisono.train.data.load import load
from unisono.train.step.train_step import next_step
from unisono_contrib.train.samplers.weights import digest_of, expected, holder_of, whole_weights

pytestmark = pytest.mark.timeout(120)


def gathered(ctx: RankContext, folder: str, plan: str) -> dict[str, Any]:
    told = recipe(Path(folder) / str(ctx.rank), dtype="float32")
    run, feed, _ = started(ctx, told, plan)
    weights = whole_weights(run)
    begun = {name: digest_of(x) for name, x in weights.items()}
    next_step(run, feed)
    after: dict[str, Tensor] = whole_weights(run)
    holder = holder_of(told, load(told.data, told.model), run.replica.dtype)
    holder.put(1, after)
    complete = dict(holder.held().digests) == expected(after, holder.ties)
    moved = {name: digest_of(x) for name, x in after.items()}
    return {
        "begun": begun,
        "moved": moved,
        "changed": sum(moved[n] != begun[n] for n in moved),
        "complete": complete,
    }


@pytest.mark.parametrize("plan", ["dp=2 sync=canonical", "shard=2", "shard=2 zero=1", "tp=2", "pp=2"])
def test_every_rank_has_the_whole_weights_of_one_device(world: World, tmp_path: Path, plan: str) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    alone = world(gathered, 1, folder=str(tmp_path), plan="dp=1 sync=canonical")[0]
    ranks = world(gathered, 2, folder=str(tmp_path), plan=plan)
    assert all(rank == ranks[0] for rank in ranks) and ranks[0]["complete"]
    assert ranks[0]["begun"] == alone["begun"]
    assert ranks[0]["changed"] == len(alone["begun"]) == alone["changed"]
    if "canonical" in plan:
        assert ranks[0]["moved"] == alone["moved"]
