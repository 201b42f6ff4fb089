"""Ranks on threads instead of processes, for tests in which processes are not the point."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.ranks import World
from unisono.config import Recipe
from unisono.plan import Plan
from unisono.verify.prover import ENTRY, Proof, prove_on
from unisono_contrib.launch.on_threads import ThreadForkServer, context


@pytest.fixture(scope="module")
def ranks_on_threads() -> Iterator[None]:
    """Verbs that are called in this process, by `unisono.cli.main`, start their ranks on threads of it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("unisono.launch.fork_server", "unisono.verify.prover"):
            patch.setattr(f"{module}.ForkServer", ThreadForkServer)
        yield


def prove(
    recipe: Recipe, plans: Sequence[Plan], steps: int, each: Callable[[Proof], None] = lambda proof: None
) -> list[Proof]:
    """As `verify.prover.prove`, with ranks on threads."""
    return prove_on(ThreadForkServer(ENTRY), recipe, plans, steps, each)


def on_threads(
    function: Callable[..., Any], ranks: int, *, timeout: float = 120.0, group: bool = True, **kwargs: Any
) -> list[Any]:
    """[result of each rank] of `function(ctx, **kwargs)`."""
    from unisono_contrib.comm.threads import run

    def live(rank: int) -> Any:
        return function(context(rank, ranks), **kwargs)

    return run(ranks, live, join=group, timeout=timeout)


@pytest.fixture(scope="session")
def threads() -> World:
    """`threads(fn, ranks, *, group=True, **kwargs) -> [result of each rank]`, as `world` of tests.ranks, on threads."""
    return on_threads
