"""Who plays a script in its user's place: it gives `unisono.init` another plan and other ranks, and sees the job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from unisono.launch.context import RankContext
from unisono.plan import Plan


@dataclass(frozen=True, slots=True)
class ScriptStage:
    """plan: instead of the script's own. context: this rank. see: is shown each Job before the script has it."""

    plan: Plan
    context: RankContext
    see: Callable[[Any], None]


_STAGE: ContextVar[ScriptStage] = ContextVar("who plays this script")


def stage() -> ScriptStage | None:
    """The one that this script is played on; None where its user has started it."""
    return _STAGE.get(None)


@contextmanager
def staged(on: ScriptStage) -> Iterator[None]:
    """What is called inside is played on this stage."""
    token = _STAGE.set(on)
    try:
        yield
    finally:
        _STAGE.reset(token)
