"""Groups: what collectives return, that a group of one moves nothing, that bytes are counted."""

from datetime import timedelta

import pytest
import torch

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder

pytestmark = pytest.mark.timeout(120)


def collectives(ctx):
    recorder = Recorder(ctx.rank)
    mesh = Mesh(Shape(dp=ctx.world), ctx.rank, recorder, timedelta(seconds=60))
    own = torch.arange(ctx.world * 2, dtype=torch.float64).view(ctx.world * 2, 1) * (ctx.rank + 1)
    summed = mesh.dp.all_reduce(own.clone())
    gathered = mesh.dp.all_gather(torch.full((2, 1), float(ctx.rank)))
    scattered = mesh.dp.reduce_scatter(own)
    sent = mesh.dp.broadcast(torch.tensor([float(ctx.rank)]), source=1)
    return {
        "summed": summed.flatten().tolist(),
        "gathered": gathered.flatten().tolist(),
        "scattered": scattered.flatten().tolist(),
        "sent": sent.tolist(),
        "bytes": {f"{axis}.{op}": n for (axis, op), n in recorder.bytes().items()},
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_mean_what_they_say(world, ranks):
    results = world(collectives, ranks)
    factor = sum(range(1, ranks + 1))
    whole = [float(i * factor) for i in range(ranks * 2)]
    for rank, result in enumerate(results):
        assert result["summed"] == whole
        assert result["gathered"] == [float(r) for r in range(ranks) for _ in range(2)]
        assert result["scattered"] == whole[rank * 2 : rank * 2 + 2]
        assert result["sent"] == [1.0]
        assert result["bytes"]["dp.reduce_scatter"] == ranks * 2 * 8 * (ranks - 1) // ranks
        assert result["bytes"]["dp.all_gather"] == 2 * 4 * (ranks - 1)


def test_a_group_of_one_moves_nothing():
    recorder = Recorder()
    solo = Group("dp", [0], 0, None, recorder)
    x = torch.ones(3)
    assert solo.all_reduce(x) is x and solo.all_gather(x) is x and solo.reduce_scatter(x) is x
    solo.start_all_reduce(x).wait()
    solo.barrier()
    assert recorder.bytes() == {}
