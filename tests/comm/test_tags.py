"""Messages of all kinds in one group at once are told apart, and what is under way may be waited for twice."""

from datetime import timedelta
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from unisono.comm import tags
from unisono.comm.collectives.memory import slots
from unisono.comm.collectives.memory.live import BufferSum
from unisono.comm.collectives.memory.passing import SharedRoom
from unisono.comm.collectives.messages import Messages
from unisono.comm.collectives.messages.live import MessageAlgorithm, agreed
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.parallel.attend.ring.live import start_pass
from unisono_contrib.comm import threads as worlds

pytestmark = pytest.mark.timeout(60)


def pp_of(rank: int, size: int) -> object:
    return Mesh(Shape(pp=size), rank, Recorder(rank), timedelta(seconds=5)).pp


def test_no_two_kinds_of_message_have_a_tag_in_common() -> None:
    every = sorted(
        (one for one in vars(tags).values() if isinstance(one, tags.TagRange)), key=lambda one: one.first
    )
    assert len(every) > 5
    assert all(one.first + one.count <= other.first for one, other in pairwise(every))
    assert every[-1].first + every[-1].count < 1 << 31, "Gloo's tags have 31 bits"
    for one in every:
        assert (
            one.of(one.count) == one.of(0) == one.first and one.of(one.count - 1) == one.first + one.count - 1
        )


def test_a_large_sum_does_not_take_the_word_of_a_large_message() -> None:
    """Both under way in one group: the sum's second word had the tag of the message's."""

    def both(rank: int) -> tuple[float, float]:
        group = pp_of(rank, 2)
        with patch.object(slots, "LARGE", 64):
            way, room = slots.slots_of(group, 4096, torch.device("cpu")), SharedRoom(group.pg)
            x, total = torch.full((100,), 7.0), torch.ones(1000)
            coming = way.start_recv(x := torch.zeros(100), 1) if rank == 0 else None
            room.all_reduce(total, dist.ReduceOp.SUM).wait()
            pending = coming or way.start_send(torch.full((100,), 7.0), 0)
            pending.wait()
            return float(x.mean()) if rank == 0 else 7.0, float(total.mean())

    assert worlds.run(2, both) == [(7.0, 2.0)] * 2


def waited_twice(ctx: object) -> list[str]:
    """What is not as it was after the second wait."""
    group, wrong = pp_of(ctx.rank, ctx.world), []
    other, rank = 1 - ctx.rank, ctx.rank

    def check(name: str, pending: object, result: torch.Tensor, wanted: float) -> None:
        pending.wait()
        pending.wait()
        if result.mean().item() != wanted:
            wrong.append(f"{name}: {result.mean().item()}, not {wanted}")

    x, out = torch.full((9,), float(rank)), torch.zeros(9)
    ends = group.start_recv(out, other), group.start_send(x, other)
    for end in reversed(ends):
        check("a message", end, x, rank)
    check("a message", ends[0], out, other)
    check("a pass", start_pass(group, out, x), out, other)
    check("words", agreed(group.pg), out, other)
    large = torch.full((1 << 18,), 1.0 + rank)
    check(
        "two shots",
        MessageAlgorithm(Messages(), group.pg).all_reduce(large, dist.ReduceOp.SUM),
        large,
        3.0,
    )
    shared = slots.mapped(group.pg, 1 << 12, torch.float32)
    shared[rank].fill_(1.0 + rank)
    check("a meeting", BufferSum(group.pg, shared, rank, agreed(group.pg)), shared[rank], 3.0)
    way = slots.slots_of(group, 1 << 20 << 2, torch.device("cpu"))
    whole, taken = torch.full((1 << 20,), 1.0 + rank), torch.zeros(1 << 20)
    for _ in range(2):
        ends = way.start_recv(taken, other), way.start_send(whole, other)
        check("a large message", ends[1], whole, 1.0 + rank)
        check("a large message", ends[0], taken, 1.0 + other)
    return wrong


def test_what_is_under_way_may_be_waited_for_twice(world: object) -> None:
    """Gloo waits for a message once more, until its deadline; sums were added up again."""
    assert world(waited_twice, 2) == [[], []]


@pytest.mark.parametrize(("machine", "there"), [("x86_64", True), ("aarch64", False), ("ppc64le", False)])
def test_slots_are_for_processors_that_keep_the_order_of_loads_and_stores(
    monkeypatch: pytest.MonkeyPatch, machine: str, there: bool
) -> None:
    """The byte that frees a slot is a plain store: elsewhere it may be seen before what lies in the slot was read."""
    monkeypatch.setattr(slots.os, "uname", lambda: type("Named", (), {"machine": machine}))
    found = worlds.run(
        2, lambda rank: slots.slots_of(pp_of(rank, 2), slots.LARGE, torch.device("cpu")) is not None
    )
    assert found == [there] * 2
