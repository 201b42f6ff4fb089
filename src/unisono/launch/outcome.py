"""How a run ended. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.spec import words
from unisono.spec.errors import Interrupted, UnisonoError, UserCodeError


@dataclass(frozen=True)
class Outcome:
    """How a run ended: one result a rank (None where there is none), the error to show, the exit code.

    `stopped` is "interrupt" (Ctrl-C) or "terminate" (SIGTERM) when the run ended because it was asked to; then `exit`
    is 130 or 75, and `error` is None if the ranks ended in good order. losses: how often ranks were lost and replaced.
    """

    results: list[dict[str, Any] | None]
    error: UnisonoError | None
    exit: int
    stopped: str = ""
    losses: int = 0

    def why(self) -> str:
        """What ended a run that did not end well, as a terminal shows it: the error, and the rank's own traceback."""
        if self.error is None:
            return f"stopped before its end (exit code {self.exit})"
        return "\n".join(filter(None, (self.error.trace or self.error.shown, self.error.render())))

    def returned(self) -> list[dict[str, Any]]:
        """What each rank returned, {} where that was None. Raises the error of a run that did not end well, with the
        rank's own traceback as a note, and Interrupted for a run that was stopped."""
        if self.error is not None:
            if self.error.trace:
                self.error.add_note(self.error.trace)
                self.error.add_note(self.error.render())
            raise self.error
        if self.stopped:
            raise Interrupted("stopped by Ctrl-C")
        return [result or {} for result in self.results]


def ended(
    results: list[dict[str, Any] | None], error: UnisonoError | None, stopped: str, losses: int = 0
) -> Outcome:
    """The outcome of a run of which all ranks are gone."""
    code = error.exit if error is not None else {"": 0, "interrupt": 130, "terminate": 75}[stopped]
    return Outcome(results, error, code, stopped, losses)


def helper_killed(host: str) -> UnisonoError:
    """The error of a run whose ranks' parent has gone, and they with it."""
    return UserCodeError(
        "the process that starts the ranks was killed",
        likely="the kernel ran out of memory (dmesg says so), or somebody killed it",
        host=host,
        code="R02",
    )


def host_gone(name: str, ranks: Sequence[int], room: int) -> UnisonoError:
    """The error of a run that cannot go on without a host. room: for how many ranks there still is some."""
    return UserCodeError(
        f"host {name} is gone, and with it {'ranks ' if len(ranks) > 1 else 'rank '}{words.listed(ranks)}",
        likely=f"it was switched off or cut off; with room for {room} ranks the run cannot go on, or launch.recover is"
        " false",
        fix="unisono train --resume RUN, once it is back or under another plan",
        rank=ranks[0],
        host=name,
        code="R02",
    )
