"""A run of forked ranks: they compute together, and nobody stays behind."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import World

pytestmark = pytest.mark.timeout(120)


def everything(ctx, add):
    x = torch.ones(3) * ctx.rank + add
    dist.all_reduce(x)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    y = torch.ones(1) * ctx.rank
    dist.all_reduce(y, group=halves[ctx.rank // 2])
    z = torch.zeros(1)
    if ctx.rank % 2:
        dist.send(torch.ones(1) * ctx.rank, ctx.rank - 1)
    else:
        dist.recv(z, ctx.rank + 1)
    dist.barrier()
    store = dist.PrefixStore("p", ctx.store)
    store.set("k", "v")
    return {
        "x": x.tolist(),
        "y": y.item(),
        "z": z.item(),
        "k": store.get("k").decode(),
        "threads": torch.get_num_threads(),
    }


def test_ranks_compute_together(world: World) -> None:
    results = world(everything, 4, add=1.0, threads=1)
    assert [r["x"] for r in results] == [[10.0] * 3] * 4
    assert [r["y"] for r in results] == [1.0, 1.0, 5.0, 5.0]
    assert [r["z"] for r in results] == [1.0, 0.0, 3.0, 0.0]
