"""Ranks on threads instead of processes, for tests in which processes are not the point.

`ThreadNursery("module:entry")` does what `launch.nursery.Nursery` does, in this process: `entry(ctx, argument, shared)`
on every rank, `prepare(argument)` before.
"""

import importlib
import traceback
from collections.abc import Callable
from typing import Any

from unisono.launch.context import Channel, NullChannel, RankContext
from unisono.launch.supervise import Outcome
from unisono.spec.errors import UnisonoError, UserCodeError


class Told(Channel):
    """What rank 0 sends is heard at once."""

    def __init__(self, rank: int, hear: Callable[[int, dict[str, Any]], None]) -> None:
        self._rank, self._hear = rank, hear

    def send(self, kind: str, **fields: Any) -> None:
        self._hear(self._rank, {"kind": kind, **fields})

    def stop_requested(self) -> bool:
        return False


class ThreadNursery:
    def __init__(self, entry: str) -> None:
        module, _, name = entry.partition(":")
        self._module = importlib.import_module(module)
        self._entry = getattr(self._module, name)

    def run(
        self,
        argument: dict[str, Any],
        ranks: int,
        threads: int = 1,
        on_event: Callable[[int, dict[str, Any]], None] | None = None,
        timeout: float | None = None,
        backend: str = "auto",
    ) -> Outcome:
        from unisono.comm import threads as world

        prepare = getattr(self._module, "prepare", None)
        shared = None if prepare is None else prepare(argument)

        def live(rank: int) -> Any:
            channel = NullChannel() if on_event is None else Told(rank, on_event)
            store = world.store()
            ctx = RankContext(
                rank, ranks, rank, ranks, "here", threads, world.BACKEND, store, channel, "token"
            )
            return self._entry(ctx, argument, shared)

        try:
            return Outcome(world.run(ranks, live, join=False, timeout=timeout or 120.0), None, 0)
        except UnisonoError as error:
            return Outcome([], error, 1)
        except Exception as error:
            return Outcome(
                [],
                UserCodeError(f"{type(error).__name__}: {error}"),
                1,
                "".join(traceback.format_exception(error)),
            )
