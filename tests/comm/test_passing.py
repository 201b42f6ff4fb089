"""What passes through memory that all see: each operation gives what it means, with others under way, in pieces."""

import random
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from unisono.comm.collectives import memory as declared
from unisono.comm.collectives.auto import Auto
from unisono.comm.collectives.engine import Engine
from unisono.comm.collectives.memory import InMemory, passing
from unisono.comm.tree import tree_sum

pytestmark = pytest.mark.timeout(120)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
OPS = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")


def drawn(rank, turn, numel, dtype):
    own = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-50, 50, (numel,), generator=own).div(1 if dtype == torch.int64 else 7).to(dtype)


def begun(algorithm, op, turn, numel, dtype, rank, size):
    """(pending, what it fills, what that shall be) of an operation on parts of `numel` elements."""
    each = [drawn(other, turn, numel * size, dtype) for other in range(size)]
    own, out = each[rank].clone(), torch.empty(numel * size, dtype=dtype)
    if op == "all_reduce":
        kind = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)[turn % 3]
        whole = torch.stack(each)
        wanted = (tree_sum(each), whole.amax(0), whole.amin(0))[turn % 3]
        return algorithm.all_reduce(own, kind), own, wanted
    if op == "all_gather":
        place = out[rank * numel : (rank + 1) * numel]
        part = place.copy_(own[:numel]) if turn % 2 else own[:numel].clone()
        return algorithm.all_gather(out, part), out, torch.cat([x[:numel] for x in each])
    dealt = torch.cat([x[rank * numel : (rank + 1) * numel] for x in each])
    if op == "all_to_all":
        return algorithm.exchange(out, own), out, dealt
    part = out[:numel]
    algorithm.reduce_scatter(part, own)
    return None, part, tree_sum(dealt.view(size, numel).unbind(0))


def turns(ctx, piece):
    """Faults of a hundred operations, of which up to five are under way, waited for in an order of chance."""
    faults = []
    with ExitStack() as patched:
        patched.enter_context(patch.object(passing, "PIECE", piece))
        patched.enter_context(patch.object(declared, "LARGE", dict.fromkeys(OPS, 1)))
        algorithm = InMemory().bind(_get_default_group(), "dp")
        chance, under_way = random.Random(3), []
        for turn in range(100):
            op, dtype = chance.choice(OPS), chance.choice(DTYPES)
            numel = chance.choice((0, 1, 7, 64, 331))
            under_way.append((turn, op, begun(algorithm, op, turn, numel, dtype, ctx.rank, ctx.world)))
            while len(under_way) > chance.randrange(6):
                number, name, (pending, found, wanted) = under_way.pop(chance.randrange(len(under_way)))
                if pending is not None:
                    pending.wait()
                if not torch.equal(found, wanted):
                    faults.append(f"turn {number}: {name} of {found.numel()} {found.dtype}")
        for _, _, (pending, *_) in under_way:
            pending and pending.wait()
    return faults


@pytest.mark.parametrize(("ranks", "piece"), [(2, 512), (3, 512), (4, 1 << 20)])
def test_each_operation_means_what_it_says_whatever_else_is_under_way(world, ranks, piece):
    assert world(turns, ranks, piece=piece) == [[]] * ranks


def chosen(ctx):
    """What is taken for large and for small tensors, and bytes of this process's room."""
    algorithm = Auto().bind(_get_default_group(), "shard")
    large, small = torch.ones(2 << 20), torch.ones(8)
    return [
        [algorithm.pick(op, x, later).member.name for op in OPS[:3] for later in (False, True)]
        for x in (large, small)
    ]


def test_large_tensors_pass_through_memory_where_they_are_waited_for_at_once(world):
    large, small = world(chosen, 2)[0]
    assert large == ["memory", "engine", "memory", "messages", "memory", "engine"]
    assert small == ["messages", "engine", "messages", "messages", "engine", "engine"]


def test_sums_are_those_of_the_engine_to_the_bit(world):
    assert all(world(both, 3))


def both(ctx):
    x, a, b = drawn(ctx.rank, 0, 3 << 20, torch.float32), torch.empty(1 << 20), torch.empty(1 << 20)
    Engine().bind(_get_default_group(), "dp").reduce_scatter(a, x)
    InMemory().bind(_get_default_group(), "dp").reduce_scatter(b, x)
    return torch.equal(a, b)
