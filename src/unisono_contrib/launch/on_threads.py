"""Ranks on threads instead of processes, where processes are not the point: a fuzz plays thousands of small worlds.

`ThreadForkServer("module:entry")` does what `launch.fork_server.ForkServer` does, in this process:
`entry(ctx, argument, shared)` on every rank, `prepare(argument)` before.
"""

import importlib
from collections.abc import Sequence
from typing import Any, Self

from unisono.launch.context import Channel, NullChannel, RankContext
from unisono.launch.loop import OnEvent
from unisono.launch.outcome import Outcome
from unisono.spec.errors import UnisonoError, UserCodeError


class HeardChannel(Channel):
    """What a rank sends is heard at once."""

    def __init__(self, rank: int, hear: OnEvent) -> None:
        self._rank, self._hear = rank, hear

    def send(self, kind: str, **fields: Any) -> None:
        self._hear(self._rank, {"kind": kind, **fields})

    def stop_requested(self) -> bool:
        return False


def context(rank: int, ranks: int, hear: OnEvent | None = None) -> RankContext:
    """What a rank on a thread knows about itself."""
    from unisono_contrib.comm.threads import BACKEND, store  # who imports this may do without torch

    channel = NullChannel() if hear is None else HeardChannel(rank, hear)
    return RankContext(rank, ranks, rank, ranks, "here", 1, BACKEND, store(), channel, "token")


class ThreadForkServer:
    """Stands in for a fork server; see the module."""

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
        """As `ForkServer.run`; what none of ours raises is a UserCodeError."""
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
