"""The n-th call of a group is the same on all its ranks: a difference is told at once, and honest ranks never differ."""

import json
import threading
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import World
from unisono.comm import begun
from unisono.launch.rank.calls import Calls, Ledger
from unisono.launch.rank_status import RankStatus
from unisono.launch.run import verdict
from unisono.launch.run.verdict import differing
from unisono.spec.errors import HangError

pytestmark = pytest.mark.timeout(60)


def every_collective(rank, size, group):
    """All that torch has for CPUs, with tensors that differ between ranks where they may."""
    x = torch.ones(2 * size)
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_reduce(x, group=group)
    dist.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16), op=dist.ReduceOp.MAX, group=group)
    dist.all_gather(parts, torch.ones(2), group=group)
    dist.all_gather_into_tensor(torch.empty(2 * size), torch.ones(2), group=group)
    dist.reduce_scatter_tensor(torch.empty(2), x, group=group)
    sizes = [1 + (rank + other) % 2 for other in range(size)]  # uneven, and fitting
    dist.all_to_all_single(torch.empty(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes, group=group)
    dist.broadcast(torch.ones(3, dtype=torch.uint8 if rank else torch.int8), 0, group=group)
    dist.reduce(torch.ones(4), 0, group=group)
    dist.gather(torch.ones(2), parts if rank == 0 else None, 0, group=group)
    dist.scatter(torch.ones(2), parts if rank == 0 else None, 0, group=group)
    dist.all_gather_object([None] * size, {"a": "b" * rank}, group=group)
    dist.broadcast_object_list([rank], 0, group=group)
    dist.barrier(group=group)
    if rank < 2:
        (dist.send if rank else dist.recv)(torch.ones(1), 1 - rank, group=group)
    work: list[Any] = [dist.all_reduce(torch.ones(5), group=group, async_op=True) for _ in range(3)]
    for one in work:
        one.wait()


def looked_at(ctx):
    """Honest work and laggards, while another thread compares as fast as it can. Returns what it took for a mismatch,
    and how many calls of its neighbour's it held beside its own at last."""
    store, over, found, looks = dist.PrefixStore("beside", ctx.store), threading.Event(), [], []
    calls = Calls(ctx.rank, store)

    def look():
        while not over.is_set():
            found.extend(calls.compare())
            looks.append(len(calls._known))

    pair: list[Any] = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    thread = threading.Thread(target=look)
    thread.start()
    for turn in range(12):
        if turn % 3 == ctx.rank:
            sum(range(2_000_000))  # the others wait meanwhile
        every_collective(ctx.rank, ctx.world, None)
        for group in pair:
            if dist.get_rank(group) >= 0:
                dist.all_reduce(torch.ones(1 + turn), group=group)
    over.set()
    thread.join()
    calls.compare()
    dist.barrier()
    theirs = json.loads(store.get(f"watchdog/calls/{(ctx.rank - 1) % ctx.world}"))
    both = sum(str(n) in theirs.get(label, {}) for label, own in calls._known.items() for n in own)
    return {"found": found, "looks": min(len(looks), 3), "groups": max(looks), "both": both > 40}


def test_honest_ranks_never_differ(world: World) -> None:
    expected = [{"found": [], "looks": 3, "groups": groups, "both": True} for groups in (3, 2, 2)]
    assert world(looked_at, 3) == expected


def of_two_groups_of_one_name(ctx):
    """What is known of the world's group after it was made anew: before and after its first call, and a message."""
    seen = []
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()
    store = dist.PrefixStore("anew", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=2)
    seen.append(len(begun.latest()))
    (dist.send if ctx.rank else dist.recv)(torch.ones(1), 1 - ctx.rank)
    seen.append(len(begun.latest()))
    dist.broadcast(torch.ones(2), 0)
    (calls,) = begun.latest(frames=True).values()
    seen.append([[n, one.says, one.shown, one.frames[-1][2] != ""] for n, one in calls.items()])
    return seen


def test_calls_of_a_group_that_is_gone_are_forgotten(world: World) -> None:
    last = [[1, "broadcast 8", "broadcast of float32 [2]", True]]
    assert world(of_two_groups_of_one_name, 2) == [[0, 0, last]] * 2


def other_shapes(ctx):
    dist.all_reduce(torch.ones(3 + 400 * ctx.rank))


def fewer_bytes(ctx):
    dist.broadcast(torch.ones(3 + 400 * ctx.rank), 0)
    ctx.store.get("what nobody sets")


def another_call(ctx):
    dist.all_reduce(torch.ones(4))
    if ctx.rank == 1:
        dist.all_gather([torch.ones(4) for _ in range(2)], torch.ones(4))
    dist.barrier()


def message_of_another_size(ctx):
    if ctx.rank:
        dist.recv(torch.ones(1), 0)
    else:
        dist.send(torch.ones(100), 1)
    dist.barrier()


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (other_shapes, "rank 1 called all_reduce of float32 [403]; rank 0 called all_reduce of float32 [3]"),
        (fewer_bytes, "rank 1 called broadcast of float32 [403]; rank 0 called broadcast of float32 [3]"),
        (another_call, "rank 1 called all_gather of float32 [4]; rank 0 called barrier"),
        (message_of_another_size, "rank 1 got another message than the one waited for in recv"),
    ],
)
def test_a_mismatch_is_told_at_once_with_both_calls_and_the_line(world: World, work, what: str) -> None:
    with pytest.raises(HangError) as caught:
        world(work, 2)  # whose deadline is minutes away
    error = caught.value
    assert error.what.startswith(what), error.what
    assert (error.rank, error.code, error.exit) == (1, "H02", 6)
    assert error.where.endswith(f"in {work.__name__}") and "test_calls.py" in error.where


class Words(dict):
    """A store of one process."""

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)


def after(batches, ranks=2):
    """What ranks find, and say, of the batches that each has noted."""
    store, found = Words(), []
    everyone = []
    for rank, numbers in enumerate(batches):
        ledger = Ledger()
        for number in numbers:
            ledger.note("backward", tuple(range(ranks)), f"batch {number}" if number else "", number)
        everyone.append(Calls(rank, store, ledger))
    for calls in (*everyone, *everyone):
        found += calls.compare()
    answers = [calls.answers(found, RankStatus(rank, "waits")) for rank, calls in enumerate(everyone)]
    return found, differing(answers)


def test_whoever_is_ahead_has_left_out_a_batch() -> None:
    found, called = after([[1, 3], [1, 2]])
    assert found and [one.doing() for one in called] == ["batch 3", "batch 2"]
    error = verdict.hang(called, 0.0)
    assert error.rank == 0 and error.what == "rank 0 called batch 3; rank 1 called batch 2"
    assert "test_calls.py" in error.where and error.code == "H02"


def test_ranks_that_lag_or_do_not_know_do_not_differ() -> None:
    assert after([[1, 2, 3], [1]])[0] == [] and after([[1, 2, 3], []])[0] == []
    assert after([[1, 0, 3], [1, 2, 3]])[0] == []


def test_what_only_one_rank_still_knows_is_no_mismatch() -> None:
    told = {"says": "x", **asdict(RankStatus(0, "called", op="x"))}
    assert differing([[told], [None]]) == []
    assert len(differing([[told], [{**told, "says": "y"}]])) == 2
