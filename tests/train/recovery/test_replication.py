"""Snapshots are copied to a rank of another host, which has them whole or not at all."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some

from tests.ranks import World
from unisono.train.build.build import Place
from unisono.train.recovery.replication import Replication, SnapshotReplicas, keepers
from unisono.train.recovery.snapshot_buffer import Snapshot, SnapshotBuffer
from unisono.train.rejoin import merged
from unisono.train.state.checkpoint.boxes import Box

pytestmark = pytest.mark.timeout(120)
LARGE = 2_500_000  # elements: more than two parts


@given(some.lists(some.integers(1, 4), min_size=2, max_size=5))
def test_a_copy_lies_on_the_next_host_and_no_rank_keeps_many_more_than_another(counts: list[int]) -> None:
    hosts = [host for host, count in enumerate(counts) for _ in range(count)]
    keeper = keepers(hosts)
    for rank, to in enumerate(keeper):
        assert hosts[to] == (hosts[rank] + 1) % len(counts)
    for host, count in enumerate(counts):
        kept = [keeper.count(rank) for rank, at in enumerate(hosts) if at == host]
        assert sum(kept) == counts[host - 1] and max(kept) - min(kept) <= 1 and len(kept) == count


def _place(ctx: Any) -> Place:
    return Place(ctx.rank, ctx.world, torch.device("cpu"), "gloo", timedelta(seconds=30))


def _boxes(rank: int, step: int, size: int) -> list[Box]:
    return [Box(f"model/{rank}", (size,), (0,), torch.full((size,), float(100 * rank + step)))]


def _kept(replicas: SnapshotReplicas) -> list[list[Any]]:
    """What lies there for others: (step, the tensor, its number, whether it is sound)."""
    return [
        [one.step, box.name, box.tensor.unique().tolist(), box.tensor.numel(), one.sound()]
        for one in replicas.snapshots()
        for box in one.boxes
    ]


def copied(ctx: Any, hosts: list[int], sizes: list[int]) -> list[Any]:
    """Three snapshots in turn, each copied."""
    own = SnapshotBuffer.new()
    replicas = SnapshotReplicas(own)
    if ctx.rank == 0:  # ranks have made different numbers of groups, as those of a pipeline have
        dist.new_group([0], use_local_synchronization=True)
    copies = replicas.copies(_place(ctx), ctx.store, hosts)
    seen = []
    for step in (1, 2, 3):
        own.put(step, {"at": step}, _boxes(ctx.rank, step, sizes[ctx.rank]))
        copies.begin()
        copies.settle(30.0)
        assert copies.ready() and not copies.failed, copies.failed
        seen.append(_kept(replicas))
    replicas.drop(after=2)
    seen.append(_kept(replicas))
    return seen


@pytest.mark.parametrize(
    ("hosts", "sizes"), [([0, 1], [LARGE, 3]), ([0, 0, 1], [3, LARGE, 2]), ([0, 1, 1], [LARGE, 1, LARGE])]
)
def test_a_keeper_has_the_newest_two(world: World, hosts: list[int], sizes: list[int]) -> None:
    seen = world(copied, len(hosts), hosts=hosts, sizes=sizes)
    keeper = keepers(hosts)
    for rank, of in enumerate(seen):
        peers = [peer for peer, to in enumerate(keeper) if to == rank]

        def kept(*steps: int, peers: list[int] = peers) -> list[list[Any]]:
            return [
                [at, f"model/{peer}", [100.0 * peer + at], sizes[peer], True]
                for peer in peers
                for at in steps
            ]

        assert of == [kept(1), kept(2, 1), kept(3, 2), kept(2)]


def cut_short(ctx: Any) -> list[Any]:
    """The sender has two snapshots; while it sends the second its connection breaks."""
    own = SnapshotBuffer.new()
    replicas = SnapshotReplicas(own)
    copies = replicas.copies(_place(ctx), ctx.store, [0, 1])
    for step in (1, 2):
        own.put(step, {}, _boxes(ctx.rank, step, LARGE))
        if step == 2 and ctx.rank == 1:
            break_after(copies, 2)
        copies.begin()
        copies.settle(30.0 if step == 1 else 3.0)  # rank 0 waits for what does not come
    return [_kept(replicas), copies.failed]


def break_after(copies: Replication, sends: int) -> None:
    """The process leaves in the middle: so many messages went out."""
    inner: Any = copies._pg

    class Breaks:
        left = sends

        def send(self, *args: Any) -> Any:
            if not self.left:
                raise RuntimeError("broken")
            self.left -= 1
            return inner.send(*args)

        def recv(self, *args: Any) -> Any:
            return inner.recv(*args)

    copies._pg = Breaks()


def test_a_copy_that_does_not_end_leaves_the_one_before(world: World) -> None:
    (kept, _), (_, broken) = world(cut_short, 2)
    assert broken == "broken"
    assert kept == [[1, "model/1", [101.0], LARGE, True]]


def refused(ctx: Any) -> list[Any]:
    """The keeper of rank 0 has no memory for a second copy."""
    own = SnapshotBuffer.new()
    replicas = SnapshotReplicas(own)
    copies = replicas.copies(_place(ctx), ctx.store, [0, 1])
    real = os.pwrite
    for step in (1, 2):
        own.put(step, {}, _boxes(ctx.rank, step, LARGE))
        if step == 2 and ctx.rank == 1:
            os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        copies.begin()
        copies.settle(30.0)
    os.pwrite = real
    return [_kept(replicas), copies.failed, copies.ready()]


def test_a_keeper_without_memory_says_so_and_has_the_one_before(world: World) -> None:
    (other, fine, _), (kept, failed, ready) = world(refused, 2)
    assert not fine and other == [
        [2, "model/1", [102.0], LARGE, True],
        [1, "model/1", [101.0], LARGE, True],
    ]
    assert ready and "No space left" in failed
    assert kept == [[1, "model/0", [1.0], LARGE, True]]


def test_of_each_step_a_rank_says_what_it_has_and_keeps_at_once() -> None:
    mine, theirs = _boxes(0, 1, 2), _boxes(1, 1, 2)
    own = [Snapshot(3, {"live": 1}, mine, live=True), Snapshot(2, {}, mine)]
    others = [Snapshot(2, {}, theirs), Snapshot(1, {"at": 1}, theirs)]
    found = {one.step: one for one in merged(own, others, {"recent": []})}
    assert {step: [box.name for box in one.boxes] for step, one in found.items()} == {
        3: ["model/0"],
        2: ["model/0", "model/1"],
        1: ["model/1"],
    }
    assert found[3].live and found[1].state == {"at": 1, "recent": []}


class Late:
    """A group whose first message comes when it is let, and whose others come at once, full of ones."""

    def __init__(self) -> None:
        self.let, self.count = threading.Event(), 0

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.count += 1
        count, tensor = self.count, tensors[0]

        def wait() -> None:
            tensor.fill_(200 if count == 1 else 1)
            if count == 2:
                self.let.wait(30)

        return SimpleNamespace(wait=wait)

    def send(self, *_: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)


def test_after_the_end_an_old_copy_writes_into_no_file(tmp_path: Path) -> None:
    """Its buffer is closed, and the number of its file is that of a checkpoint which is being written."""
    own, peer, late = SnapshotBuffer.new(), SnapshotBuffer.new(), Late()
    own.put(1, {}, _boxes(0, 1, 8))
    copies = Replication(late, own, 1, {1: peer})
    copies.begin()
    while late.count < 2:
        time.sleep(0)
    copies.end(0.05)
    peer.close()
    files = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(8)]
    late.let.set()
    copies.settle(30)
    assert copies.ready() and copies.failed
    assert [os.fstat(file).st_size for file in files] == [0] * 8
    for file in files:
        os.close(file)
    own.close()
