"""Messages through memory: each is the one that was sent, however many are under way and whoever waits for what first."""

import os
import random
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch

from unisono.comm.collectives.memory import mapping, slots
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono_contrib.comm import threads as worlds

pytestmark = pytest.mark.timeout(120)
MOST, LEAST = 4000, 400  # bytes: of a slot, and from which on messages pass through it


def pp_of(rank, size):
    return Mesh(Shape(pp=size), rank, Recorder(rank), timedelta(seconds=60)).pp


def message(source, to, turn):
    own = torch.Generator().manual_seed(1000 * turn + 10 * source + to)
    dtype = (torch.float32, torch.int64, torch.bfloat16)[turn % 3]
    numel = (7, 100, 500, 1000, 3, 333)[turn % 6]  # some too small for a slot, some too large
    return torch.randint(-99, 99, (numel,), generator=own).to(dtype)


def exchanged(rank, size, kind):
    """Faults of what came, and how often no slot was free. kind: how many messages are under way at once."""
    group, chance, faults, whole = pp_of(rank, size), random.Random(rank), [], 0
    with patch.object(slots, "LARGE", LEAST):
        way = slots.slots_of(group, MOST if rank else 0, torch.device("cpu"))
        peers = [other for other in range(size) if other != rank]
        for first in range(0, 24, kind):
            turns = [(peer, turn) for turn in range(first, first + kind) for peer in peers]
            coming = [(p, t, torch.empty_like(message(p, rank, t))) for p, t in turns]
            arriving = [(way.start_recv(out, p), p, t, out) for p, t, out in coming]
            sent = [(way.start_send(x, p), x) for p, t in turns for x in [message(rank, p, t)]]
            whole += sum(len(getattr(getattr(work, "pending", work), "works", ())) == 2 for work, _ in sent)
            chance.shuffle(arriving)
            for pending, peer, turn, out in arriving:
                pending.wait()
                if not torch.equal(out, message(peer, rank, turn)):
                    faults.append(f"turn {turn} from rank {peer}")
            for work, _ in sent:
                work.wait()
    return faults, whole


def on_processes(ctx, kind):
    group = pp_of(ctx.rank, ctx.world)
    before = len(os.listdir("/proc/self/fd"))
    slots.slots_of(group, slots.LARGE, torch.device("cpu"))
    left = len(os.listdir("/proc/self/fd")) - before
    return [*exchanged(ctx.rank, ctx.world, kind), left]


@pytest.mark.parametrize(("ranks", "kind"), [(2, 1), (3, 6)])
def test_each_message_is_the_one_that_was_sent(world, ranks, kind):
    results = world(on_processes, ranks, kind=kind)
    assert [(faults, left) for faults, _, left in results] == [([], 0)] * ranks
    if kind > slots.SLOTS:
        assert all(whole for _, whole, _ in results), "more than slots: some follow their word"


@pytest.mark.parametrize("seed", [1, 2])
def test_on_threads_in_any_order_of_turns(seed):
    assert [faults for faults, _ in worlds.run(3, lambda rank: exchanged(rank, 3, 4), seed=seed)] == [[]] * 3


def test_what_is_small_or_elsewhere_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(rank):
        group = pp_of(rank, 2)
        small = slots.slots_of(group, slots.LARGE - 1, torch.device("cpu"))
        with monkeypatch.context() as apart:
            apart.setattr(mapping, "_made", lambda nbytes, token: -1)
            return small, slots.slots_of(group, slots.LARGE, torch.device("cpu"))

    assert worlds.run(2, none) == [(None, None)] * 2
