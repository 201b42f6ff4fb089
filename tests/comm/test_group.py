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
def test_collectives_mean_what_they_say(threads, ranks):
    results = threads(collectives, ranks)
    factor = sum(range(1, ranks + 1))
    whole = [float(i * factor) for i in range(ranks * 2)]
    for rank, result in enumerate(results):
        assert result["summed"] == whole
        assert result["gathered"] == [float(r) for r in range(ranks) for _ in range(2)]
        assert result["scattered"] == whole[rank * 2 : rank * 2 + 2]
        assert result["sent"] == [1.0]
        assert result["bytes"]["dp.reduce_scatter"] == ranks * 2 * 8 * (ranks - 1) // ranks
        assert result["bytes"]["dp.all_gather"] == 2 * 4 * (ranks - 1)


def in_flight(ctx):
    """Several gathers and exchanges at once, which are waited for in another order; one of nothing."""
    dp = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60)).dp
    own = [torch.arange(ctx.world * n, dtype=torch.float64) + 100 * ctx.rank for n in (1, 0, 30_000)]
    exchanged = [dp.start_exchange(x) for x in own]
    out = [torch.full((ctx.world * x.numel(),), -1.0, dtype=torch.float64) for x in own]
    gathered = [dp.start_all_gather(o, x) for o, x in zip(out, own, strict=True)]
    for pending in [*gathered, *(work for _, work in exchanged)][::-1]:
        pending.wait()
    in_place = torch.full((ctx.world, 3), -1.0)
    in_place[ctx.rank] = ctx.rank
    dp.gather_into(in_place, in_place[ctx.rank])
    rows = dp.all_gather(torch.arange(6.0).view(2, 3).T + ctx.rank)  # not contiguous
    every = [[x - 100 * ctx.rank + 100 * r for r in range(ctx.world)] for x in own]
    return {
        "gathered": [torch.equal(o, torch.cat(e)) for o, e in zip(out, every, strict=True)],
        "exchanged": [
            torch.equal(parts, torch.stack([one.view(ctx.world, -1)[ctx.rank] for one in e]))
            for (parts, _), e in zip(exchanged, every, strict=True)
        ],
        "in_place": in_place.tolist(),
        "rows": rows.tolist(),
    }


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers_and_exchanges_keep_apart(threads, ranks):
    for result in threads(in_flight, ranks):
        assert all(result["gathered"]) and all(result["exchanged"])
        assert result["in_place"] == [[float(r)] * 3 for r in range(ranks)]
        assert result["rows"] == [[i + r, i + 3 + r] for r in range(ranks) for i in range(3)]


def small_and_large(ctx):
    dp = Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60)).dp
    found = {}
    for numel in (1, 5, 40_000):
        whole = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(ctx.world)]
        for op, right in (("SUM", torch.stack(whole).sum(0)), ("MAX", torch.stack(whole).amax(0)),
                          ("MIN", torch.stack(whole).amin(0))):  # fmt: skip
            got = dp.all_reduce(whole[ctx.rank].clone(), getattr(torch.distributed.ReduceOp, op))
            same = dp.all_gather(got.view(1, -1))
            found[f"{op} {numel}"] = torch.allclose(got, right, atol=1e-5) and bool((same == same[0]).all())
    ints = dp.all_reduce(torch.tensor([2**40 + ctx.rank]))
    columns = dp.all_reduce(torch.ones(3, 2).T)  # not contiguous
    return found | {"ints": ints.item(), "columns": columns.tolist()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reductions_of_every_size_are_the_same_everywhere(threads, ranks):
    for result in threads(small_and_large, ranks):
        assert result.pop("ints") == ranks * 2**40 + sum(range(ranks))
        assert result.pop("columns") == [[float(ranks)] * 3] * 2
        assert all(result.values()), result


def test_a_group_of_one_moves_nothing():
    recorder = Recorder()
    solo = Group("dp", [0], 0, None, recorder)
    x = torch.ones(3)
    assert solo.all_reduce(x) is x and solo.all_gather(x) is x and solo.reduce_scatter(x) is x
    solo.start_all_reduce(x).wait()
    solo.barrier()
    assert recorder.bytes() == {}
