"""A cluster of Ray: the one that `RAY_ADDRESS` names, or one that is started here. No torch."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unisono.launch.signals import heard
from unisono.spec.errors import UsageError


@contextmanager
def connected(asks: str, instead: str, **options: Any) -> Iterator[Any]:
    """The library, connected to the cluster; at the end a cluster that was started here ends. asks, instead: for the
    error, what needs Ray and what does without. Raises UsageError E01 where it is not installed."""
    ray = library(asks, instead)
    begun = not ray.is_initialized()
    if begun:
        with _same_handlers():
            ray.init(include_dashboard=False, logging_level="ERROR", **options)
    try:
        yield ray
    finally:
        if begun:
            ray.shutdown()


def library(asks: str = "this", instead: str = "") -> Any:
    """Ray, imported late. Raises UsageError E01 without it."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.exceptions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            f"{asks} needs ray, which is not installed", where="unisono", code="E01",
            fix="; ".join(filter(None, ('pip install "unisono[ray]"', instead))),
        ) from error  # fmt: skip
    return ray


@contextmanager
def _same_handlers() -> Iterator[None]:
    """At its end signals have the handlers that they had: ray.init sets some by which SIGTERM aborts the process."""
    before = {number: signal.getsignal(number) for number in heard()}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            signal.signal(number, handler)
