"""Play the bugs of the zoo, and the same code without them, through `unisono.check_gradients`."""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from unisono.launch.fork_server import ForkServer
from unisono.library.gradient_check import ENTRY, GradientVerdict, check_on
from unisono_contrib.library.stacks._check import stack_on, updates_on
from unisono_contrib.library.stacks._rank import ENTRY as UPDATES
from unisono_contrib.zoo import bugs
from unisono_contrib.zoo.toys import RANKS, Gradients
from unisono_contrib.zoo.toys_update import MICROS


@dataclass(frozen=True, slots=True)
class PlayedBug:
    """What Unisono says of a bug and of its twin without it. name: of the bug's file. mechanism: in one sentence.

    cause: the right one, a name of docs/proving-your-own-code.md. Both verdicts are those of the first step.
    """

    name: str
    address: str
    stack: str
    mechanism: str
    cause: str
    verdict: GradientVerdict
    twin: GradientVerdict

    @property
    def is_caught(self) -> bool:
        """Whether the wrong loop is convicted."""
        return not self.verdict.passed

    @property
    def is_named(self) -> bool:
        """Whether the cause is the right one."""
        return self.is_caught and self.verdict.cause == self.cause

    @property
    def error(self) -> float:
        """Return the largest error of any tensor, of its largest entry."""
        verdict = self.verdict
        errors = verdict.updates if verdict.what == "updates" else verdict.errors
        return max(errors.values(), default=0.0)


def names() -> list[str]:
    """Return the names of all bugs, in order."""
    return sorted(module.name for module in pkgutil.iter_modules(bugs.__path__))


def lacks(name: str) -> str:
    """Return the package that a bug is played with where it is not installed here, or ""."""
    needs = getattr(bug_of(name), "NEEDS", "")
    package, _, version = needs.partition("==")
    if not needs or (
        importlib.util.find_spec(package) and importlib.metadata.version(package).startswith(version)
    ):
        return ""
    return needs


def bug_of(name: str) -> ModuleType:
    """Return a bug's module."""
    return importlib.import_module(f"{bugs.__name__}.{name}")


def played(chosen: Sequence[str]) -> Iterator[PlayedBug]:
    """Play the chosen bugs that are playable here, each wrong and right, on ranks forked from the same process."""
    with ForkServer(ENTRY) as gradients, ForkServer(UPDATES) as updates:
        for name in (name for name in chosen if not lacks(name)):
            yield play(name, gradients, updates)


def play(name: str, gradients: ForkServer, updates: ForkServer) -> PlayedBug:
    """Play a bug and its twin on processes forked from these: of check_gradients and of check_updates."""
    bug = bug_of(name)
    if hasattr(bug, "ADAPTER"):
        verdicts = [
            stack_on(updates, bug.ADAPTER, bug.Step, RANKS, MICROS, 1, options)
            for options in (bug.WRONG, bug.RIGHT)
        ]
    else:
        verdicts = [_judged(bug, loop, gradients, updates) for loop in (bug.wrong, bug.right)]
    mechanism = " ".join((bug.__doc__ or "").split())
    return PlayedBug(name, bug.ADDRESS, bug.STACK, mechanism, bug.CAUSE, *verdicts)


def _judged(
    bug: ModuleType, loop: Callable[[Any], Gradients], gradients: ForkServer, updates: ForkServer
) -> GradientVerdict:
    if hasattr(bug, "Step"):
        return updates_on(updates, bug.Step, loop, RANKS, MICROS)
    return check_on(
        gradients, bug.reference, loop, RANKS, getattr(bug, "LAYOUT", None), meets=getattr(bug, "MEETS", None)
    )
