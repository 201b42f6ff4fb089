"""What torch's recorder says of collectives, where groups are destroyed and made again under the same names."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import World
from unisono.comm import begun

pytestmark = pytest.mark.timeout(60)


def made_again(ctx):
    """(what is known of the second group while it has only sent messages, what without the first one's end, after)."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("1", ctx.store), rank=ctx.rank, world_size=ctx.world
    )
    dist.all_reduce(torch.ones(3))
    one: Any = dist.group.WORLD
    first = one._get_backend(torch.device("cpu"))
    number = first._get_sequence_number_for_group()
    dist.destroy_process_group()
    since = begun.groups_made()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("2", ctx.store), rank=ctx.rank, world_size=ctx.world
    )
    again: Any = dist.group.WORLD
    backend: Any = again._get_backend(torch.device("cpu"))
    while backend._get_sequence_number_for_group() < number:  # as many as the first has begun of anything
        dist.send(torch.ones(1), 1 - ctx.rank) if ctx.rank else dist.recv(torch.ones(1), 1 - ctx.rank)
    alike = backend._get_sequence_number_for_group() == number
    messages, mixed = begun.latest(since=since), begun.latest()
    dist.all_reduce(torch.ones(5))
    after = [one.shown for calls in begun.latest(since=since).values() for one in calls.values()]
    until = time.monotonic() + 20.0
    while (pending := begun.is_any_pending(since)) and time.monotonic() < until:
        os.sched_yield()  # the recorder hears of the end in Gloo's own thread, a moment after who waited for it
    return alike, len(messages), len(mixed), after, pending


def test_a_group_is_not_taken_for_one_of_its_name_that_is_gone(world: World) -> None:
    for alike, messages, mixed, after, pending in world(made_again, 2, group=False):
        assert alike and mixed == 1  # the recorder itself mixes them
        assert messages == 0 and after == ["all_reduce of float32 [5]"] and not pending
