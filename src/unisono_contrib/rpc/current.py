"""The worker of a thread."""

from contextvars import ContextVar
from typing import TYPE_CHECKING

from unisono_contrib.rpc.errors import no_member

if TYPE_CHECKING:
    from unisono_contrib.rpc.worker import Worker

HERE: ContextVar["Worker"] = ContextVar("the worker of this thread")


def here() -> "Worker":
    """The worker of this thread. Raises UsageError Q06 where `rpc.init` was not called, or in a thread that the script
    has started, which takes it along by `contextvars.copy_context().run`."""
    worker = HERE.get(None)
    if worker is None:
        raise no_member(
            "no worker in this thread", "rpc.init() first; copy_context().run in a thread of yours"
        )
    return worker
