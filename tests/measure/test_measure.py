"""What is timed, on ranks that are threads: everything once, the same on all ranks."""

from datetime import timedelta

import pytest
import torch

from tests.measure.recipes import sized
from tests.ranks import World
from unisono.comm.mesh import Mesh, Shape
from unisono.measure import steps, timings
from unisono.observe.span import PARTS, Recorder
from unisono.train.build.build import place_of
from unisono_contrib.comm.threads import run

CPU = torch.device("cpu")
SIZES = {"n_layer": 1, "n_head": 2, "d_model": 8, "context": 4, "vocab": 16}


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduces_are_timed_alike_by_all(ranks):
    def timed(rank: int) -> list[tuple[int, float]]:
        mesh = Mesh(Shape(dp=ranks), rank, Recorder(rank), timedelta(seconds=30))
        return timings.all_reduces(mesh.dp, [1 << 10, 1 << 14], CPU, least=0.001)

    first, *others = run(ranks, timed)
    assert [size for size, _ in first] == [1 << 10, 1 << 14]
    assert all(seconds > 0.0 for _, seconds in first)
    assert all(other == first for other in others)


def test_steps_are_played_and_their_parts_told(threads: World):
    for medians in threads(played, 2):
        assert set(medians) == {*PARTS, "step"} and medians["step"] > 0.0


def played(ctx):
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    world = Mesh(Shape(tp=2), ctx.rank, Recorder(), timedelta(seconds=30)).world

    def largest(number: float) -> float:
        return world.all_reduce(torch.tensor([number]), torch.distributed.ReduceOp.MAX).item()

    return steps.play(sized(SIZES, batch=4, micro_batch=2), "tp=2", place, largest, least=0.01)


def test_kernels_take_longer_the_more_there_is_to_do():
    (few, many) = timings.products([(8, 8, 8), (512, 512, 512)], CPU, torch.float32)
    assert few[:3] == (8, 8, 8) and 0.0 < few[3] < many[3]
    (small, large) = timings.copies([1 << 10, 1 << 24], CPU)
    assert small[0] == 2 << 10 and 0.0 < small[1] < large[1]
