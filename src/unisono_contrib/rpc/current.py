"""The worker of a thread."""

from contextvars import ContextVar
from typing import Any

from unisono_contrib.rpc.errors import no_member

HERE: ContextVar[Any] = ContextVar("the worker of this thread")
"""An RpcWorker; its file imports those that ask for it here."""


def here() -> Any:
    """The RpcWorker of this thread. Raises UsageError Q06 where `rpc.init` was not called, or in a thread that the
    script has started, which takes it along by `contextvars.copy_context().run`."""
    worker = HERE.get(None)
    if worker is None:
        raise no_member(
            "no worker in this thread", "rpc.init() first; copy_context().run in a thread of yours"
        )
    return worker
