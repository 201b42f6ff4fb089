"""Errors as users meet them: one block, printed last, with a code, a place, a cause and a remedy.

UnisonoError
├── UserCodeError   exit 1    the user's code raised, or the numbers went bad
├── PeerGone        exit 1    another rank left in the middle of a collective
├── UsageError      exit 2    bad flags, recipe, plan, data or environment
├── VerifyMismatch  exit 3    a plan does not compute what one device computes
├── DoctorFault     exit 4    the machine is not fit
├── Infeasible      exit 5    no memory for the plan, or ran out of it
├── HangError       exit 6    a collective never completed
├── Skipped         exit 77   what it takes is not here: nothing was run
├── Stopped         exit 75   saved on request of the machine: start me again
└── Interrupted     exit 130  Ctrl-C
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unisono.spec.doubtful import visible

_LONGEST = 2000  # letters of a field, of which a good one has a few hundred: a word may be a whole file
_END = 200
_BLOCKS = 50  # problems that are drawn


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe or a plan, and its remedy."""

    code: str
    what: str
    where: str = ""
    fix: str = ""
    likely: str = ""


class UnisonoError(Exception):
    """Root of all errors that a user is shown; `exit` is the process's exit code.

    shared: every rank raises it, so one of them is to tell it. shown: what stands above the block on a screen, a short
    traceback or nothing. trace: the whole traceback, for `error.json`.
    """

    exit: ClassVar[int] = 1
    default_code: ClassVar[str] = "X00"

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        likely: str = "",
        fix: str = "",
        rank: int | None = None,
        host: str = "",
        code: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.likely, self.fix = what, where, likely, fix
        self.rank, self.host, self.shared = rank, host, False
        self.shown = self.trace = ""
        self.code = code or self.default_code

    def render(self) -> str:
        """The block of the contract: `error U-<code>  what, rank, host`, then where, likely, try. What it tells of
        files and words of others is made visible: none of it reaches a terminal as a command."""
        head = f"error U-{self.code}  {_cut(self.what)}"
        if self.rank is not None:
            head += f", rank {self.rank}"
        if self.host:
            head += f", host {self.host}"
        rows = (("where", self.where), ("likely", self.likely), ("try", self.fix))
        return visible("\n".join([head, *(f"  {name:<7} {_cut(text)}" for name, text in rows if text)]))

    def as_dict(self) -> dict[str, Any]:
        """What `error.json` and `--json` carry."""
        return {
            "schema_version": 1,
            "code": f"U-{self.code}",
            "exit": self.exit,
            "what": self.what,
            "where": self.where,
            "likely": self.likely,
            "try": self.fix,
            "rank": self.rank,
            "host": self.host,
            **({"traceback": self.trace} if self.trace else {}),
        }


class UserCodeError(UnisonoError):
    exit = 1
    default_code = "R01"


class PeerGone(UnisonoError, RuntimeError):
    """Another rank, `rank`, has gone while this one waited for it. A RuntimeError too, as torch's own would be."""

    exit = 1
    default_code = "R03"


class UsageError(UnisonoError):
    exit = 2
    default_code = "C00"


class VerifyMismatch(UnisonoError):
    exit = 3
    default_code = "V01"


class DoctorFault(UnisonoError):
    exit = 4
    default_code = "D01"


class Infeasible(UnisonoError):
    exit = 5
    default_code = "M01"


class HangError(UnisonoError):
    exit = 6
    default_code = "H01"


class Stopped(UnisonoError):
    exit = 75
    default_code = "S01"


def out_of_grace(grace: float) -> str:
    """What is said where a run that was asked to stop could not save in time."""
    return f"stopped as asked, without a new checkpoint: the grace of {grace:g} s (launch.grace) is over"


class Skipped(UnisonoError):
    exit = 77  # as make check and others know it
    default_code = "L06"


class Interrupted(UnisonoError):
    exit = 130
    default_code = "S02"


def _cut(text: str) -> str:
    """Where something long is quoted, what is wrong with it stands behind it."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - _END]}... ({len(text)} letters) ...{text[-_END:]}"


def _line(problem: Problem) -> tuple[int, str, int]:
    """Where a problem stands first: `plan.tp (my.toml:3), ...`; those of flags and variables come after all files."""
    at = re.search(
        r"(?<![^(, ])([^(, ]+):(\d{1,9})\b", problem.where
    )  # begun at words alone: they may be long
    return (0, at[1], int(at[2])) if at else (1, "", 0)


class ConfigProblems(UsageError):
    """Several problems at once: each is drawn as its own block, in the order of the lines that they stand in."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(first.what, where=first.where, likely=first.likely, fix=first.fix, code=first.code)
        self.problems = tuple(problems)

    def render(self) -> str:
        blocks = [
            UsageError(p.what, where=p.where, likely=p.likely, fix=p.fix, code=p.code).render()
            for p in sorted(self.problems, key=_line)[:_BLOCKS]
        ]
        left = len(self.problems) - len(blocks)
        return "\n".join([*blocks, *([f"and {left} problems more"] if left else [])])

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        fields["problems"] = [
            {"code": f"U-{p.code}", "what": p.what, "where": p.where, "try": p.fix} for p in self.problems
        ]
        return fields
