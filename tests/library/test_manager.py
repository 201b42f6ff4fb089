"""A loop written against torchft's manager goes on without a worker that was killed, and a new one joins it."""

import os
import signal
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


def trained(ctx: Any, victim: int, fatal: int, place: str) -> dict[str, Any]:
    """The loop. One worker is killed at a place of a step, or reports an error of its own there."""
    first = ctx.rendezvous is None
    torch.manual_seed(ctx.rank if first else 99)  # the state comes from another
    model, inner = parts()
    manager = Manager(ctx, model.load_state_dict, model.state_dict)
    optimizer = ManagedOptimizer(manager, inner)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    log, tries = [], 0

    def reached(here: str) -> None:
        if first and (ctx.rank, manager.current_step(), here) == (victim, fatal, place):
            os.kill(os.getpid(), signal.SIGKILL)

    while manager.current_step() < STEPS:
        reached("quorum")
        optimizer.zero_grad()
        before, tries = manager.current_step(), tries + 1
        loss_of(model, before, ctx.rank).backward()
        for number, p in enumerate(model.parameters()):
            reached(f"message {number}")
            assert p.grad is not None
            manager.allreduce(p.grad).wait()
        if place == "doubt" and (ctx.rank, before) == (victim, fatal) and tries == fatal + 1:
            manager.report_error(ValueError("a bad batch"))
        reached("vote")
        optimizer.step()
        if manager.current_step() > before:
            log.append([before, manager.num_participants(), manager.participating_rank(), flat(model)])
    manager.shutdown()
    return {"log": log, "batches": manager.batches_committed(), "tries": tries}


def reference(victim: int, fatal: int) -> list[list[float]]:
    """One process; a worker's samples are left out of one step."""
    torch.manual_seed(0)
    model, optimizer = parts()
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        workers = [worker for worker in range(3) if (worker, step) != (victim, fatal)]
        torch.stack([loss_of(model, step, worker) for worker in workers]).mean().backward()
        optimizer.step()
        weights.append(flat(model))
    return weights


def on_workers(nursery: ForkServer, losses: int, **kwargs: Any) -> list[dict[str, Any]]:
    argument = {"function": "trained", "group": False, "kwargs": kwargs, "module": __name__, "file": __file__}
    outcome = nursery.run(argument, 3, recovers=True, timeout=30, backend="gloo")
    results = [result["value"] for result in outcome.returned()]
    assert outcome.losses == losses
    return results


@pytest.mark.timeout(90)
@pytest.mark.parametrize("place", ["quorum", "message 0", "message 2", "vote"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_new_worker_gets_the_state_of_a_live_one(nursery: ForkServer, victim: int, place: str) -> None:
    """The same bits on all live workers after each committed step; to rounding those of one process that left the
    killed worker's samples out of that step."""
    workers = on_workers(nursery, 1, victim=victim, fatal=FATAL, place=place)
    live = [number for number in range(3) if number != victim]
    for number, worker in enumerate(workers):
        begin = FATAL if number == victim else 0
        assert [line[0] for line in worker["log"]] == [*range(begin, STEPS)], "each step is committed once"
        for step, count, part, weights in worker["log"]:
            there = live if step == FATAL else [0, 1, 2]
            assert count == len(there)
            assert part == (there.index(number) if number in there else None)
            assert weights == workers[live[0]]["log"][step][3], (number, step)
        assert worker["batches"] == 3 * STEPS - 1
    for line, weights in zip(workers[live[0]]["log"], reference(victim, FATAL), strict=True):
        assert line[3] == pytest.approx(weights, abs=1e-12)


@pytest.mark.timeout(90)
def test_a_step_that_one_worker_doubts_is_made_again_by_all(nursery: ForkServer) -> None:
    workers = on_workers(nursery, 0, victim=2, fatal=FATAL, place="doubt")
    for worker in workers:
        assert worker["tries"] == STEPS + 1 and worker["log"] == [
            [step, 3, worker["log"][0][2], workers[0]["log"][step][3]] for step in range(STEPS)
        ]
    for line, weights in zip(workers[0]["log"], reference(-1, -1), strict=True):
        assert line[3] == pytest.approx(weights, abs=1e-12)
