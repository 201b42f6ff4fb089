"""What is timed, on ranks that are threads: everything once, the same on all ranks; and what becomes of the times."""

from datetime import timedelta
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import World
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.threads import run
from unisono.measure import collectives, kernels, steps
from unisono.measure.recipes import sized
from unisono.observe.span import PARTS, Recorder
from unisono.train.build.build import place_of

CPU = torch.device("cpu")
SIZES = {"n_layer": 1, "n_head": 2, "d_model": 8, "context": 4, "vocab": 16}


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_are_timed_alike_by_all(ranks):
    def timed(rank: int) -> list[tuple[str, int, float]]:
        mesh = Mesh(Shape(dp=ranks), rank, Recorder(rank), timedelta(seconds=30))
        return collectives.timed(mesh.dp, [1 << 10, 1 << 14], CPU, least=0.001)

    first, *others = run(ranks, timed)
    told = [(op, size) for op, size, _ in first]
    assert len(set(told)) == len(told)
    assert {op for op, _ in told} >= set(collectives.OPS) - {"shared_sum"}
    assert all(seconds > 0.0 for _, _, seconds in first)
    assert all(other == first for other in others)


def test_steps_are_played_and_their_parts_told(threads: World):
    for times in threads(played, 2):
        assert len(times.laps) >= 5
        for lap in times.laps:
            assert set(lap) == {*PARTS, "step"} and lap["step"] > 0.0
        assert times.quiet["step"] <= times.medians["step"] * 1.001
        assert {op for op, _, _ in times.calls} and all(n >= 0 and s > 0.0 for _, n, s in times.calls)


def played(ctx):
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    world = Mesh(Shape(tp=2), ctx.rank, Recorder(), timedelta(seconds=30)).world

    def agree(number: float) -> float:
        return world.all_reduce(torch.tensor([number]), torch.distributed.ReduceOp.MAX).item()

    return steps.play(sized(SIZES, batch=4, micro_batch=2), "tp=2", place, agree, least=0.01)


@given(
    st.lists(
        st.tuples(st.sampled_from(("send", "all_gather")), st.sampled_from((8, 64)), st.floats(1e-6, 1e3)),
        min_size=1,
        max_size=40,
    )
)
def test_means_leave_out_slow_ones_only(calls):
    for op, nbytes, mean in steps.means(calls):
        took = sorted(s for o, n, s in calls if (o, n) == (op, nbytes))
        assert took[0] * (1 - 1e-9) <= mean <= fmean(took) * (1 + 1e-9)
    assert [(op, n) for op, n, _ in steps.means(calls)] == sorted({(op, n) for op, n, _ in calls})


def test_kernels_take_longer_the_more_there_is_to_do():
    (few, many) = kernels.products([(8, 8, 8), (512, 512, 512)], CPU, torch.float32)
    assert few[:3] == (8, 8, 8) and 0.0 < few[3] < many[3]
    (small, large) = kernels.copies([1 << 10, 1 << 24], CPU)
    assert small[0] == 2 << 10 and 0.0 < small[1] < large[1]
    assert 0.0 < kernels.launch(CPU, count=20) < 0.1
