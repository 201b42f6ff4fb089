"""Buffers that all ranks of a host see: the sum is the sum, the same bits in all, and where they cannot be, none is."""

import hashlib
import os
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.collectives.memory import mapping as memory
from unisono.comm.collectives.memory.live import BufferSum
from unisono.comm.collectives.memory.mapping import part_of
from unisono.comm.collectives.messages import SMALL
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder

pytestmark = pytest.mark.timeout(120)
SIZES = (1, 15, 17, 4096, 100_003)


def dp_of(ctx):
    return Mesh(Shape(dp=ctx.world), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60)).dp


def drawn(rank, turn, size, dtype):
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(100 * turn + rank))


def sums(ctx):
    """A digest of every sum, each of which is as near to the sum in double precision as its type allows."""
    dp, found = dp_of(ctx), []
    for dtype, near in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        for size in SIZES:
            buffer = dp.buffer(size, torch.empty(0, dtype=dtype))
            assert bool((buffer == 0).all()) and buffer.dtype == dtype
            for turn in range(3):  # what one sum leaves behind does not reach the next
                buffer.copy_(drawn(ctx.rank, turn, size, dtype))
                pending = dp.start_all_reduce(buffer)
                assert isinstance(pending.pending, BufferSum) == (buffer.nbytes * (ctx.world - 1) > SMALL)
                pending.wait()
                whole = sum(drawn(rank, turn, size, dtype).double() for rank in range(ctx.world))
                assert torch.allclose(buffer.double(), whole, atol=near)
                found.append(hashlib.sha256(buffer.numpy().tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_everybody_has_the_sum_to_the_same_bit(world, ranks):
    results = world(sums, ranks)
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) == 2 * 3 * len(SIZES), "no sum is that of another turn"


def far(ctx):
    """One rank is elsewhere, or has no such memory, or another file has the number of its own."""
    made, network, found = memory._made, memory._network, []
    for broken in ("_network", "_made", "token"):
        memory._made, memory._network = made, network
        if ctx.rank == 1 and broken == "_network":
            memory._network = lambda: -5
        elif ctx.rank == 1:
            none = broken == "_made"
            memory._made = lambda nbytes, token, none=none: -1 if none else made(nbytes, token ^ 1)
        dp = dp_of(ctx)
        before = len(os.listdir("/proc/self/fd"))
        buffer = dp.buffer(100, torch.empty(0)).fill_(ctx.rank + 1.0)
        pending = dp.start_all_reduce(buffer)
        pending.wait()
        left = len(os.listdir("/proc/self/fd")) - before
        found.append(
            [dp.near(torch.device("cpu")), isinstance(pending.pending, BufferSum), buffer.sum().item(), left]
        )
    return found


def test_where_one_cannot_see_the_others_all_send(world):
    for seen in world(far, 2):
        assert seen == [[False, False, 300.0, 0]] * 3


def near_at_hand(ctx):
    dp = dp_of(ctx)
    before = len(os.listdir("/proc/self/fd"))
    buffer, other = dp.buffer(1000, torch.empty(0)), torch.ones(1000)
    part = dp.start_all_reduce(buffer[:10].fill_(1.0))
    part.wait()
    whole = dp.start_all_reduce(other)
    whole.wait()
    return [isinstance(one.pending, BufferSum) for one in (part, whole)], other[0].item(), buffer[0].item(), (
        len(os.listdir("/proc/self/fd")) - before
    )  # fmt: skip


def test_only_a_whole_buffer_meets_in_memory_and_no_file_stays_open(world):
    for kinds, other, first, left in world(near_at_hand, 2):
        assert kinds == [False, False] and other == 2.0 and first == 2.0 and left == 0


@given(st.integers(1, 10_000), st.integers(1, 9))
def test_parts_are_all_elements_once_and_begin_at_lines(numel, size):
    parts = [part_of(numel, i, size) for i in range(size)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(numel))
    assert all(part.start % 16 == 0 for part in parts if part.start < part.stop)
