"""Play the bugs of the zoo, and the same code without them, through `unisono.check_gradients`."""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from unisono.launch.fork_server import ForkServer
from unisono.library.gradient_check import ENTRY, GradientVerdict, check_on
from unisono_contrib.zoo import bugs
from unisono_contrib.zoo.toys import RANKS


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
        return max(self.verdict.errors.values(), default=0.0)


def names() -> list[str]:
    """Return the names of all bugs, in order."""
    return sorted(module.name for module in pkgutil.iter_modules(bugs.__path__))


def played(chosen: Sequence[str]) -> Iterator[PlayedBug]:
    """Play the chosen bugs, each wrong and right, on ranks forked from the same process."""
    with ForkServer(ENTRY) as server:
        for name in chosen:
            yield _play(server, name, importlib.import_module(f"{bugs.__name__}.{name}"))


def _play(server: ForkServer, name: str, bug: ModuleType) -> PlayedBug:
    ranks = getattr(bug, "RANKS", RANKS)
    layout, meets = getattr(bug, "LAYOUT", None), getattr(bug, "MEETS", None)
    verdicts = [
        check_on(server, bug.reference, loop, ranks, layout) for loop in (bug.wrong, bug.right)
    ]
    mechanism = " ".join((bug.__doc__ or "").split())
    return PlayedBug(name, bug.ADDRESS, bug.STACK, mechanism, bug.CAUSE, *verdicts)
