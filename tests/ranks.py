"""`world(fn, ranks)`: run a function of a test module on forked ranks joined by Gloo, from one import of torch.

    def total(ctx, add):                      # at the top of a test module
        x = torch.ones(3) * ctx.rank + add
        dist.all_reduce(x)
        return {"x": x.tolist()}

    def test_total(world):
        assert world(total, 4, add=1.0) == [{"x": [10.0] * 3}] * 4

Arguments and results are JSON. A rank that raises makes the call raise, naming the rank.
"""

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.forked import helper, preload
from unisono.launch.fork_server import ForkServer

ROOT = str(Path(__file__).parents[1])

World = Callable[..., list[Any]]


def entry(ctx: Any, argument: dict[str, Any], shared: Any) -> dict[str, Any]:
    """Runs in every rank."""
    import torch.distributed as dist  # the test session itself may do without torch

    function = shared
    for part in argument["function"].split("."):
        function = getattr(function, part)
    if argument["group"]:
        dist.init_process_group("gloo", store=ctx.store, rank=ctx.rank, world_size=ctx.world)
    return {"value": function(ctx, **argument["kwargs"])}


def prepare(argument: dict[str, Any]) -> ModuleType:
    """Runs in the helper: imports the test module, by its file since its name depends on pytest's settings."""
    name = argument["module"]
    if name not in sys.modules:
        preload()
        spec = importlib.util.spec_from_file_location(name, argument["file"])
        if spec is None or spec.loader is None:
            raise ImportError(argument["file"])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def nursery(helpers_forked: None) -> Iterator[ForkServer]:
    """One helper for the whole session; tests that need no Gloo group use it directly."""
    with ForkServer("tests.ranks:entry", path=[ROOT]) as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def helpers_forked() -> Iterator[None]:
    """Helpers of nurseries are forked from the process that has torch imported, rather than importing it."""
    with pytest.MonkeyPatch.context() as patch:
        forked = SimpleNamespace(Popen=helper, DEVNULL=subprocess.DEVNULL)
        patch.setattr("unisono.launch.local_host.subprocess", forked)
        yield


@pytest.fixture(scope="session")
def world(nursery: ForkServer) -> World:
    """`world(fn, ranks, *, timeout=120, threads=1, group=True, **kwargs) -> [result of each rank]`."""

    def run(
        function: Callable[..., Any],
        ranks: int,
        *,
        timeout: float = 120.0,
        threads: int = 1,
        group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        argument = {
            "module": function.__module__,
            "file": inspect.getfile(function),
            "function": function.__qualname__,
            "group": group,
            "kwargs": kwargs,
        }
        outcome = nursery.run(argument, ranks, threads=threads, timeout=timeout, backend="gloo")
        if outcome.error is not None:
            outcome.error.add_note(outcome.error.trace)
            raise outcome.error
        return [result["value"] for result in outcome.results if result is not None]

    return run
