"""Ranks that others started: who am I, and then be it. No torch.

The one file of the package that reads the process environment for ranks; what its variables mean, `starters` knows.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from unisono.launch.starters import Started, detect
from unisono.launch.supervise import Outcome
from unisono.spec.errors import UsageError

__all__ = ["Started", "detect", "place_here", "run_in_env"]


def place_here() -> Started | None:
    """`detect` on this process's own environment, for programs that are a rank themselves."""
    return detect(os.environ)


def run_in_env(
    entry: str,
    argument: dict[str, Any],
    show: Callable[[int, dict[str, Any]], None] | None = None,
    environ: Mapping[str, str] = os.environ,
    threads: int | None = None,
    backend: str = "auto",
    timeout: float = 600.0,
) -> Outcome:
    """Be the rank that `environ` describes and run `entry` in this very process, importing torch.

    `show` hears rank 0's events. `timeout` in seconds, for meeting the others and for each collective's store.
    Errors are in the Outcome; the caller leaves by `context.flush_and_leave(outcome.exit)`.
    """
    place = detect(environ)
    if place is None:
        raise UsageError("no rank in the process environment", fix="start with torchrun", code="L02")
    body = importlib.import_module("unisono.launch.rank_env")  # imports torch, which detection must not
    return body.run(place, entry, argument, show, threads, backend, timeout)
