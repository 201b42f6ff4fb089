"""A loop written against torchft's manager goes on without a worker that was killed, and a new one joins it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.launch.fork_server import ForkServer
from unisono_contrib.library.manager import ManagedOptimizer, Manager

STEPS, FATAL = 6, 3


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: torch.nn.Module, step: int, worker: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * step + worker)
    x = torch.randn(5, 4, generator=drawn, dtype=torch.float64)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def flat(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def trained(ctx: Any, fatal: int) -> dict[str, Any]:
    """The loop. Its first worker 1 is killed between two messages of a step."""
    torch.manual_seed(ctx.rank if ctx.rendezvous is None else 99)  # the state comes from the first
    model, inner = parts()
    if ctx.rank == 0:
        torch.manual_seed(0)
        model, inner = parts()
    manager = Manager(ctx, model.load_state_dict, model.state_dict)
    optimizer = ManagedOptimizer(manager, inner)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    log = []
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        before = manager.current_step()
        loss_of(model, before, ctx.rank).backward()
        for number, p in enumerate(model.parameters()):
            if ctx.rank == 1 and before == fatal and number == 2 and ctx.rendezvous is None:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.allreduce(p.grad).wait()
        optimizer.step()
        if manager.current_step() > before:
            log.append([before, manager.num_participants(), manager.participating_rank(), flat(model)])
    manager.shutdown()
    return {"log": log, "batches": manager.batches_committed()}


def reference(fatal: int) -> list[list[float]]:
    """One process; worker 1's samples are left out of one step."""
    torch.manual_seed(0)
    model, optimizer = parts()
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        workers = [0, 2] if step == fatal else [0, 1, 2]
        torch.stack([loss_of(model, step, worker) for worker in workers]).mean().backward()
        optimizer.step()
        weights.append(flat(model))
    return weights


def on_workers(nursery: ForkServer, fatal: int) -> list[dict[str, Any]]:
    argument = {"function": "trained", "group": False, "kwargs": {"fatal": fatal},
                "module": __name__, "file": str(Path(__file__))}  # fmt: skip
    outcome = nursery.run(argument, 3, recovers=True, timeout=30, backend="gloo")
    results = [result["value"] for result in outcome.returned()]
    assert outcome.losses == (fatal >= 0)
    return results


@pytest.mark.timeout(90)
@pytest.mark.parametrize("fatal", [FATAL, -1], ids=["killed", "all-live"])
def test_workers_agree_and_a_new_one_gets_the_state_of_a_live_one(nursery: ForkServer, fatal: int) -> None:
    """The same bits on all live workers after each committed step; to rounding those of one process."""
    workers = on_workers(nursery, fatal)
    for number, worker in enumerate(workers):
        begin = fatal if number == 1 and fatal >= 0 else 0
        assert [line[0] for line in worker["log"]] == [*range(begin, STEPS)], "each step is committed once"
        for step, count, _, weights in worker["log"]:
            assert count == (2 if step == fatal else 3)
            assert weights == workers[0]["log"][step][3], (number, step)
        assert worker["batches"] == 3 * STEPS - (fatal >= 0)
    if fatal >= 0:
        assert [workers[n]["log"][i][2] for n, i in ((0, fatal), (1, 0), (2, fatal))] == [0, None, 1]
    for line, weights in zip(workers[0]["log"], reference(fatal), strict=True):
        assert line[3] == pytest.approx(weights, abs=1e-12)
