"""`[slurm]`: what a Slurm job says beside `[job]`. No torch."""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.hostlist import hosts_in
from unisono.spec.section import Section
from unisono.spec.training import Natural

_SIGNAL = re.compile(r"([BR]*):?(?:SIG)?([A-Z]+[0-9]?|\d+)(?:@(\d+))?")
HEARD = ("USR1", "TERM", "10", "15")
"""What ranks understand as a request to save."""


class SlurmConfig(Section):
    """A job of Slurm, for `unisono launch slurm`."""

    name: ClassVar[str] = "slurm"

    partition: str = Field(default="", description="sbatch --partition")
    account: str = Field(default="", description="sbatch --account")
    qos: str = Field(default="", description="sbatch --qos")
    constraint: str = Field(default="", description="sbatch --constraint: features that nodes must have")
    nodelist: str = Field(default="", description="nodes to be on, such as node[01-04,07]")
    signal: str = Field(
        default="USR1@60",
        description="sbatch --signal: sent to ranks so many seconds before the limit; with B: to the batch script,"
        " which passes any signal on",
    )
    requeue: Literal["scontrol", "chain", "none"] = Field(
        default="scontrol",
        description="how a saved run (exit 75) is started again: by scontrol on its node, or by jobs submitted at once,"
        " each of which waits for the failure of the one before (nodes need no command of Slurm)",
    )
    at_once: Natural = Field(default=0, description="tasks of an array that may run at once; 0: any number")
    options: tuple[str, ...] = Field(
        default=(), description='further lines of sbatch, as "--exclusive"; they count more than those above'
    )

    @property
    def warning(self) -> int | None:
        """Seconds from the signal to the limit; None without a signal."""
        match = _SIGNAL.fullmatch(self.signal)
        return int(match[3] or 60) if match else None

    @property
    def trapped(self) -> str:
        """The signal that the batch script hears, as `trap` has it; "" if only ranks do."""
        match = _SIGNAL.fullmatch(self.signal)
        return match[2] if match and "B" in match[1] else ""

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        match = _SIGNAL.fullmatch(self.signal)
        if self.signal and match is None:
            yield Problem(
                "C06", f"{self.signal!r} is no signal of Slurm's", "slurm.signal", 'signal = "USR1@60"'
            )
        elif match and "B" not in match[1] and match[2] not in HEARD:
            what = f"ranks do not save on SIG{match[2]}"
            yield Problem("C06", what, "slurm.signal", f'"B:{match[2]}@60": the batch script passes it on')
        if self.nodelist and not hosts_in(self.nodelist):
            what = f"{self.nodelist!r} is no list of nodes"
            yield Problem("C06", what, "slurm.nodelist", 'nodelist = "node[01-04,07],login"')
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                yield Problem("C06", f"{option!r} is no option of sbatch", "slurm.options", '"--exclusive"')
