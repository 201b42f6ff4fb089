"""One fault, and the kinds of them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

PHASES = ("start", "load", "forward", "backward", "collective", "update", "save", "recovery")
"""Moments of a rank. start: before it meets the others. recovery: when it meets them anew. save: while a checkpoint is
written. The others lie in a step."""
IN_STEP = ("load", "forward", "backward", "collective", "update")
ANY, SUPERVISOR, HELPER = "any", "supervisor", "helper"
PARTS = ("data", "forward", "backward", "optim")
"""Of a step, that may lag."""
ABOVE = (SUPERVISOR, HELPER)
"""Processes above the ranks, with which all of them die."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A way in which things go wrong. says: for the user. options: keys that it takes, with what they are if absent.
    loses: whether a rank or a connection is lost by it, so that ranks meet anew; stays: the rank itself is not lost.
    signal: the name of the one by which it is done, if that is all. processes: whether it may befall supervisor
    and helper too."""

    says: str
    options: Mapping[str, float | str]
    loses: bool = False
    stays: bool = False
    signal: str = ""
    processes: bool = False


FAULTS: Mapping[str, FaultKind] = {
    "kill": FaultKind(
        "SIGKILL, as the kernel does without memory", {}, True, signal="SIGKILL", processes=True
    ),
    "segv": FaultKind("SIGSEGV, as a mistake in native code", {}, True, signal="SIGSEGV"),
    "stop": FaultKind("SIGSTOP, and nobody continues it", {}, True, signal="SIGSTOP"),
    "pause": FaultKind("SIGSTOP, continued after `seconds`", {"seconds": 0.2}),
    "slow": FaultKind(
        "forwards and backwards take `times` as long, and `leaf` seconds more a micro-batch, for `seconds`",
        {"times": 10.0, "leaf": 0.0, "seconds": 1.0},
    ),
    "lag": FaultKind(
        "`part` of each step takes `leaf` seconds longer, in `module` if one is named, for `seconds`",
        {"part": "backward", "module": "", "leaf": 0.2, "seconds": 1e6},
    ),
    "cut": FaultKind("its TCP connections to other ranks are shut down", {}, True, stays=True),
    "flip": FaultKind("bit `bit` of one number of a weight is the other one", {"bit": 22}),
    "fill": FaultKind("a file of `mib` MiB in the run folder for `seconds`", {"mib": 64.0, "seconds": 1.0}),
    "clock": FaultKind(
        "time.time() of the rank jumps by `seconds` and drifts by `drift` ppm",
        {"seconds": 3600.0, "drift": 0.0},
    ),
    "term": FaultKind("SIGTERM, as a scheduler preempts", {}, signal="SIGTERM", processes=True),
    "hang": FaultKind("its main thread sleeps for `seconds`", {"seconds": 3600.0}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    what: of FAULTS. who: a rank, "any" (drawn when the script is dealt to ranks), "supervisor" or "helper". It happens
    in `phase` of step `step` (from 1) or, where the rank is not there then, at its next moment; or `after` so many
    seconds of training; in `start`, `save` and `recovery` without a step the first time. late: seconds after that
    moment. options: the kind's own.
    """

    what: str
    who: int | str = ANY
    step: int | None = None
    after: float | None = None
    phase: str = "load"
    late: float = 0.0
    seconds: float = 0.0
    times: float = 0.0
    leaf: float = 0.0
    bit: int = 0
    mib: float = 0.0
    part: str = ""
    module: str = ""
    drift: float = 0.0

    @property
    def kind(self) -> FaultKind:
        return FAULTS[self.what]

    def player(self) -> int:
        """The rank that plays it; rank 0 what befalls the processes above."""
        return self.who if isinstance(self.who, int) else 0

    def due(self, phase: str, step: int | None) -> bool:
        """Whether it happens where its rank has reached `phase` of `step` (None: of no step yet)."""
        if self.after is not None:
            return False
        if self.step is None:
            return phase == self.phase
        if step is None or step < self.step:
            return False
        return phase == self.phase or (step > self.step and self.phase in IN_STEP and phase in IN_STEP)

    def as_json(self) -> dict[str, Any]:
        """What a script would say: nothing that is as it is by itself."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        taken = {"what", "who", "step", "after", *self.kind.options}
        taken |= {"phase"} if self.after is None else set()
        taken |= {"late"} if self.late else set()
        return {key: value for key, value in said.items() if key in taken and value is not None}

    def says(self) -> str:
        """`stop rank 2 in the forward of step 12`."""
        who = f"rank {self.who}" if isinstance(self.who, int) else self.who
        if self.after is not None:
            return f"{self.what} {who} after {self.after:g} s"
        when = f"in {self.phase}" + (f" of step {self.step}" if self.step is not None else "")
        return f"{self.what} {who} {when}"
