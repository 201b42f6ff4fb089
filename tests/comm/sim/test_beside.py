"""What goes on beside a run's steps on the simulated device: errors in backward, saves, and queues that open."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)


def on_device(nursery: Any, function: str, ranks: int = 1, **kwargs: Any) -> Any:
    """What a function of this module returns on the first of so many ranks."""
    argument = {"module": __name__, "file": __file__, "function": function, "group": False, "kwargs": kwargs}
    outcome = nursery.run(argument, ranks, timeout=60.0, backend="sim")
    assert outcome.error is None, outcome.error.trace
    return outcome.results[0]["value"]


def placed(ctx: Any) -> Any:
    from unisono.train.build.build import connect, place_of

    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    connect(place, ctx.store if ctx.world > 1 else None)
    return place


def raised_in_backward(ctx: Any) -> list[str]:
    """What two tries end with in which memory is short, and then one in which a hook raises, and one that is whole."""
    import torch

    from unisono_contrib.comm.sim import tally
    from unisono_contrib.comm.sim.tensor import device

    place = placed(ctx).device
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]).to(place)
    x = torch.ones(512, 64, device=place)
    whole = net(x).sum()
    held = tally().most
    seen = list[str]()
    for room in (held, held, 1 << 40, 1 << 40):
        net.zero_grad()
        whole = net(x).sum()
        device().memory.limit = room

        def hook(grad: torch.Tensor) -> None:
            raise LookupError("of the hook")

        handle = net[2].weight.register_hook(hook) if len(seen) == 2 else None
        try:
            whole.backward()
            seen.append("whole")
        except Exception as error:
            seen.append(type(error).__name__)
        device().memory.limit = 1 << 40
        if handle is not None:
            handle.remove()
    return seen


def test_an_error_in_backward_comes_to_who_called_it(nursery):
    tries = on_device(nursery, "raised_in_backward")
    assert tries == ["OutOfMemoryError", "OutOfMemoryError", "LookupError", "whole"]


def saved_beside(ctx: Any, folder: str) -> list[float]:
    """What is read of a save that went on while the host waited for nothing of the device."""
    import torch

    from unisono.train.state.checkpoint import Box, Saver, latest, read_full

    saver, w = Saver(Path(folder)), torch.full((3,), 2.0, device=placed(ctx).device)
    saver.save(1, [Box("w", (3,), (0,), w)], {}, blocking=False)
    saver.wait()
    return read_full(latest(Path(folder)))["w"].tolist()


def test_a_save_beside_the_steps_holds_what_was_computed(nursery, tmp_path):
    assert on_device(nursery, "saved_beside", folder=str(tmp_path)) == [2.0] * 3


def opened(ctx: Any) -> dict[str, Any]:
    """What is under way when the queues of a group are open."""
    import torch

    from unisono.comm.device import tally
    from unisono.comm.mesh import Mesh, Shape
    from unisono.comm.pairs import pairs_of
    from unisono.observe.span import Recorder

    place, recorder = placed(ctx), Recorder()
    calls = recorder.calls.also = list[Any]()
    group = Mesh(Shape(pp=2), ctx.rank, recorder, place.timeout).pp
    queues = pairs_of(group, place.device)
    assert queues is not None
    module: Any = torch.get_device_module(place.device)
    over = all(module.Stream(sim=stream).query() for stream in module.current_stream().sim.timeline.streams)
    under_way = [call for call in calls if not call.done_ns]
    return {"over": over, "under way": len(under_way), "races": len(tally(place.device).races)}


def test_queues_are_open_when_they_are_had(nursery):
    assert on_device(nursery, "opened", ranks=2) == {"over": True, "under way": 0, "races": 0}


def timed(ctx: Any) -> float:
    """Seconds between two moments of the device, around a product."""
    import torch

    from unisono.comm.device import mark, seconds_between

    place = placed(ctx).device
    x, begun = torch.ones(64, 64, device=place), mark(place)
    x @ x
    return seconds_between(begun, mark(place))


def test_time_passes_between_two_moments(nursery):
    assert on_device(nursery, "timed") > 0.0


def written(ctx: Any) -> dict[str, Any]:
    """What the second rank hears of a tensor that the first one changes as soon as `send` returns."""
    import torch

    from unisono.comm.device import synchronize, tally
    from unisono.comm.mesh import Mesh, Shape
    from unisono.library.exchange import ScalarExchange
    from unisono.library.ranks import Ranks
    from unisono.observe.span import Recorder

    place = placed(ctx)
    group = Mesh(Shape(dp=2), ctx.rank, Recorder(), place.timeout).dp
    ranks = Ranks(ScalarExchange(group, place.device))
    x = torch.full((4,), 1.0, device=place.device)
    if ranks.is_main:
        ranks.send(x, 1)
        x.zero_()
        ranks.recv(x, 1)
    else:
        x = ranks.recv(torch.zeros_like(x), 0)
        ranks.send(x, 0)
    synchronize(place.device)
    return {"heard": x.tolist(), "races": len(tally(place.device).races)}


def test_what_was_sent_may_change(nursery):
    assert on_device(nursery, "written", ranks=2) == {"heard": [1.0] * 4, "races": 0}
