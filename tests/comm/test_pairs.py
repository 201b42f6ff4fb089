"""Queues between GPUs: each direction its own, and opened without anybody waiting in a circle."""

from types import SimpleNamespace

import pytest
import torch

from unisono.comm.mesh import Mesh, Shape
from unisono.comm.pairs import PairQueues, _open, pairs_of
from unisono.observe.span import Recorder
from unisono.train.build.build import place_of

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_goes_up_and_what_goes_down_never_share_a_queue(index):
    used: list[tuple[str, str, int]] = []

    def queue(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            index=index,
            start_send=lambda x, to: used.append((name, "send", to)),
            start_recv=lambda out, source: used.append((name, "recv", source)),
        )

    queues = PairQueues(queue("up"), queue("down"))  # type: ignore[arg-type]
    for other in {0, 1, 2} - {index}:
        queues.start_send(torch.zeros(1), other)
        queues.start_recv(torch.zeros(1), other)
    assert set(used) == {
        (name, how, other)
        for other in {0, 1, 2} - {index}
        for how, name in (
            ("send", "up" if other > index else "down"),
            ("recv", "up" if other < index else "down"),
        )
    }


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_message_that_opens_a_queue_is_waited_for(index, upwards):
    begun: list[str] = []
    over: list[str] = []

    def message(way: str) -> SimpleNamespace:
        begun.append(way)
        return SimpleNamespace(wait=lambda: over.append(way))

    way = SimpleNamespace(
        size=3,
        index=index,
        start_send=lambda x, to: message(f"to {to}"),
        start_recv=lambda x, source: message(f"from {source}"),
    )
    _open(way, torch.device("cpu"), upwards)  # type: ignore[arg-type]
    assert begun == over and len(begun) == 2


def opened(ctx) -> list[float]:
    """What a rank hears from both its neighbours in a ring, by queues that were opened before."""
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    mesh = Mesh(Shape(pp=ctx.world), ctx.rank, Recorder(ctx.rank), place.timeout)
    assert pairs_of(mesh.pp, place.device) is None, "messages between processors pass each other"
    up, down = mesh.pp, mesh.pp.apart()
    assert up is not down
    _open(up, place.device, upwards=True)
    _open(down, place.device, upwards=False)
    queues, size = PairQueues(up, down), ctx.world
    before, behind = (ctx.rank - 1) % size, (ctx.rank + 1) % size
    rooms = [torch.zeros(1), torch.zeros(1)]
    arriving = [queues.start_recv(room, peer) for room, peer in zip(rooms, (before, behind), strict=True)]
    leaving = [queues.start_send(torch.full((1,), float(ctx.rank)), peer) for peer in (behind, before)]
    for each in (*arriving, *leaving):
        each.wait()
    return [room.item() for room in rooms]


@pytest.mark.parametrize("size", [3, 4])
def test_neighbours_in_a_ring_open_their_queues(size, threads):
    heard = threads(opened, size)
    assert heard == [[(rank - 1) % size, (rank + 1) % size] for rank in range(size)]
