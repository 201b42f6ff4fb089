"""Ranks on threads instead of processes, for tests in which processes are not the point.

`ThreadForkServer("module:entry")` does what `launch.fork_server.ForkServer` does, in this process: `entry(ctx, argument, shared)`
on every rank, `prepare(argument)` before.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import pytest

from tests.ranks import World
from unisono.config import Recipe
from unisono.launch.context import Channel, NullChannel, RankContext
from unisono.launch.loop import OnEvent
from unisono.launch.outcome import Outcome
from unisono.plan import Plan
from unisono.spec.errors import UnisonoError, UserCodeError
from unisono.verify.prover import ENTRY, Proof, prove_on


class Description(Channel):
    """What rank 0 sends is heard at once."""

    def __init__(self, rank: int, hear: OnEvent) -> None:
        self._rank, self._hear = rank, hear

    def send(self, kind: str, **fields: Any) -> None:
        self._hear(self._rank, {"kind": kind, **fields})

    def stop_requested(self) -> bool:
        return False


def context(rank: int, ranks: int, hear: OnEvent | None = None) -> RankContext:
    """What a rank on a thread is told about itself."""
    from unisono_contrib.comm.threads import (  # not above: the test session itself may do without torch
        BACKEND,
        store,
    )

    channel = NullChannel() if hear is None else Description(rank, hear)
    return RankContext(rank, ranks, rank, ranks, "here", 1, BACKEND, store(), channel, "token")


class ThreadForkServer:
    def __init__(self, entry: str, python: str = "", path: Sequence[str] = ()) -> None:
        module, _, name = entry.partition(":")
        self._module = importlib.import_module(module)
        self._entry = getattr(self._module, name)

    def run(
        self,
        argument: dict[str, Any],
        ranks: int,
        threads: int = 1,
        on_event: OnEvent | None = None,
        timeout: float | None = None,
        backend: str = "auto",
        recovers: bool = False,
        grace: float | None = None,
        **beside: Any,
    ) -> Outcome:
        import torch

        from unisono_contrib.comm.threads import run

        prepare = getattr(self._module, "prepare", None)
        shared = None if prepare is None else prepare(argument)

        def live(rank: int) -> Any:
            return self._entry(context(rank, ranks, on_event), argument, shared)

        dtype = torch.get_default_dtype()  # of the process, which ranks may set as theirs
        try:
            return Outcome(run(ranks, live, join=False, timeout=timeout or 120.0), None, 0)
        except UnisonoError as error:
            return Outcome([], error, 1)
        except Exception as error:
            return Outcome([], UserCodeError(f"{type(error).__name__}: {error}"), 1)
        finally:
            torch.set_default_dtype(dtype)

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
