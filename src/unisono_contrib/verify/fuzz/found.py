"""What came of a fuzz, whatever it draws, and how a failure is shrunk."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar


class DrawnCase(Protocol):
    """What a fuzz draws and proves."""

    @property
    def plan(self) -> str:
        """What is spread and how, in words."""
        ...

    def command(self) -> str:
        """What proves it again."""
        ...

    def values(self) -> Iterator[tuple[str, str]]:
        """(dimension, value) of each that it has."""
        ...


C = TypeVar("C", bound=DrawnCase)


@dataclass(frozen=True, slots=True)
class FuzzFailure(Generic[C]):
    """A case that is not as one device, as it was drawn, and the least one that fails too: itself until that is looked
    for. why: what the proof of the least one says, in one line. row: that proof, for --json."""

    case: C
    small: C
    why: str
    row: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """A row of --json: that of the proof, and the commands that show it."""
        commands = {"command": self.small.command(), "drawn": self.case.command()}
        return {**self.row, "plan": self.small.plan, "why": self.why, **commands}


@dataclass(slots=True)
class FuzzResult(Generic[C]):
    """What came of a fuzz. proven: cases that compute what one device does. seen: (dimension, value) → cases proven
    with it. refused: what was said of those that are not played → how many. unproven: cases whose bound is so wide that
    nothing is shown."""

    proven: int = 0
    unproven: int = 0
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[FuzzFailure[C]] = field(default_factory=list)

    def add(self, other: "FuzzResult[C]") -> None:
        """Take in what another process has seen."""
        self.proven, self.unproven = self.proven + other.proven, self.unproven + other.unproven
        self.seen.update(other.seen)
        self.refused.update(other.refused)
        self.failures += other.failures

    def prove(self, case: C) -> None:
        """Count a case that is as one device."""
        self.proven += 1
        self.seen.update(case.values())

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "proven": self.proven, "unproven": self.unproven, "refused": dict(self.refused.most_common()),
            "seen": {f"{key}={value}": number for (key, value), number in sorted(self.seen.items())},
        }  # fmt: skip


def shrunk(
    failure: FuzzFailure[C],
    smaller: Callable[[C], Iterator[C]],
    fails: Callable[[C], FuzzFailure[C] | None],
) -> FuzzFailure[C]:
    """The failure with the least case that fails too. smaller: cases with a little less; what matters most goes first.
    fails: what a case alone comes to, None where it is right or refused."""
    while True:
        tried = (fails(case) for case in smaller(failure.small))
        less = next((small for small in tried if small is not None), None)
        if less is None:
            return failure
        failure = replace(less, case=failure.case)


def kind_of(code: str, what: str) -> str:
    """Refusals of one kind have one name: code, and what was said without its numbers."""
    return f"U-{code} {''.join('N' if letter.isdigit() else letter for letter in what)}"[:90]
