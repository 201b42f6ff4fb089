"""Hybrid sharding: what `shard` sends stays on a host, what `dp` sends crosses, once a step."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.small import recipe, started
from unisono.config import LaunchConfig


def placed(ctx: Any, folder: str, plan: str, batch: int, order: str = "") -> Any:
    from unisono.train.step.train_step import train_step

    told = recipe(Path(folder), global_batch=batch, micro_batch=1)
    if order:
        told = told.model_copy(update={"launch": LaunchConfig(order=order)})
    run, feed, _ = started(ctx, told, plan)
    train_step(run, feed.fetch(0, run.leaves))
    sent = run.recorder.lap().nbytes
    of = {axis: sum(n for (where, _), n in sent.items() if where == axis) for axis in ("dp", "shard")}
    return run.mesh.dp.ranks, run.mesh.shard.ranks, of


def hosts(ranks: tuple[int, ...], each: int) -> int:
    return len({rank // each for rank in ranks})


@pytest.mark.parametrize("plan", ["dp=2 shard=2", "dp=2 shard=2 zero=3:wire=int8"])
def test_of_two_hosts_each_holds_a_replica(threads: Any, tmp_path: Path, plan: str) -> None:
    few = threads(placed, 4, folder=str(tmp_path), plan=plan, batch=4)
    for across, inside, _ in few:
        assert hosts(across, 2) == 2 and hosts(inside, 2) == 1
    many = threads(placed, 4, folder=str(tmp_path), plan=plan, batch=12)
    for (_, _, once), (_, _, thrice) in zip(few, many, strict=True):
        assert thrice["dp"] == once["dp"] > 0  # whatever is accumulated
        assert thrice["shard"] > 2 * once["shard"]


def test_another_order_deals_shards_across_hosts(threads: Any, tmp_path: Path) -> None:
    for across, inside, _ in threads(
        placed, 4, folder=str(tmp_path), plan="dp=2 shard=2", batch=4, order="dp,shard"
    ):
        assert hosts(across, 2) == 1 and hosts(inside, 2) == 2
