"""Ranks that others started: who am I, and then be it. No torch.

The one file of the package that reads the process environment for ranks; what its variables mean, `starters` knows.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from unisono.launch.context import Ending
from unisono.launch.outcome import Outcome
from unisono.launch.starters import Started, detect, idle
from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.words import whole

_AGAIN = {
    "TORCHELASTIC_RESTART_COUNT": "torchrun",
    "SLURM_RESTART_COUNT": "Slurm",
    "JOBSET_RESTART_ATTEMPT": "Kubernetes",
}
_POD = "JOB_COMPLETION_INDEX"

__all__ = ["Ending", "Started", "again", "detect", "idle", "idle_here", "place_here", "run_in_env"]


def place_here() -> Started | None:
    """`detect` on this process's own environment, for programs that are a rank themselves."""
    return detect(os.environ)


def idle_here() -> list[str]:
    """`idle` on this process's own environment."""
    return idle(os.environ)


def again(environ: Mapping[str, str]) -> tuple[int, str]:
    """(how often whoever started this process has started the job again, that in words); (0, "") where nobody says."""
    for name, who in _AGAIN.items():
        if count := whole(environ.get(name, "")):
            times = "once" if count == 1 else f"{count} times"
            pod = f", pod {environ[_POD]} of the job" if whole(environ.get(_POD, "")) is not None else ""
            return count, f"{who} has started this job again {times}{pod}"
    return 0, ""


def run_in_env(
    entry: str,
    argument: dict[str, Any],
    show: Callable[[int, dict[str, Any]], None] | None = None,
    environ: Mapping[str, str] = os.environ,
    threads: int | None = None,
    backend: str = "auto",
    timeout: float | None = None,
    hung: Callable[[UnisonoError, bool], None] = lambda error, mine: None,
    ending: Ending = Ending(),
) -> Outcome:
    """Be the rank that `environ` describes and run `entry` in this very process, importing torch.

    `show` hears rank 0's events. `timeout`: seconds that a rank may keep the others
    waiting; by the run's own steps if None. `hung` hears of a hang, on every rank; its second argument says whether
    this one is to tell it. The process then leaves with 6. `ending`: what a SIGTERM leads to.
    Errors are in the Outcome; the caller leaves by `context.flush_and_leave(outcome.exit)`.
    """
    place = detect(environ)
    if place is None:
        raise UsageError("no rank in the process environment", fix="start with torchrun", code="L02")
    body = importlib.import_module("unisono.launch.rank.under")  # imports torch, which detection must not
    return body.run(place, entry, argument, show, threads, backend, timeout, hung, ending)
