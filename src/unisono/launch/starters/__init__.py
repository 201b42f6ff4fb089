"""Who started this process as one of several ranks: torchrun, Slurm, MPI, plain variables; one starter a file.

A starter recognises its own variables and says what they mean; a set that is there in part is an error, not a guess.
Starters are asked in the order of their `turn`, and the first that knows its variables is believed. No torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from unisono.launch.run.membership import Role
from unisono.spec.errors import UsageError
from unisono.spec.family import Family, Member

Environ = Mapping[str, str]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PORT = 29500


@dataclass(frozen=True)
class Started:
    """A rank's place as its starter told it. source: which starter. local: among the ranks of this host. master, port:
    where ranks meet. restart: how often the run was started again. role: what this process does; those that are no
    trainers have ranks from `world` on. name: what the starter calls it. servers: how many there are beside the ranks.
    """

    source: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    master: str
    port: int
    restart: int = 0
    error_file: str = ""
    role: Role = Role.TRAINER
    name: str = ""
    servers: int = 0


class Starter(Member, ABC):
    """What starts ranks, by what it leaves in their environment. turn: lower ones are asked first. one_a_host: it
    starts one rank on each of several hosts, and on a single one none."""

    turn: ClassVar[int]
    one_a_host: ClassVar[bool] = False

    @abstractmethod
    def detect(self, environ: Environ) -> Started | None:
        """This rank's place, None where another starter, or none, was at work. Raises UsageError L02 for a set of
        variables that is there in part or contradicts itself."""

    @abstractmethod
    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        """Its variables for one rank of a run. hosts: ranks on each host; `(1, 0, (2, 3))` is rank 2 of five."""

    def idle(self, environ: Environ) -> str:
        """What to say where it left traces and started no rank, as in a job without its launcher; "" if none."""
        return ""


STARTERS: Family[Starter] = Family(
    "starter", "unisono.launch.starters", Starter, "environment", ("L02", "L02")
)


def idle(environ: Environ) -> list[str]:
    """What starters say that might have started ranks here, and have not."""
    return [hint for name in STARTERS.names() if (hint := STARTERS.find(name)().idle(environ))]


def detect(environ: Environ) -> Started | None:
    """The place that `environ` describes, None when nobody else started us. Raises UsageError L02."""
    known = sorted((STARTERS.find(name)() for name in STARTERS.names()), key=lambda starter: starter.turn)
    for starter in known:
        place = starter.detect(environ)
        if place is not None:
            return checked(place)
    return None


def required(environ: Environ, names: Sequence[str], source: str) -> None:
    """Raises UsageError L02 naming those of `names` that are not set."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [name for name in names if environ.get(name)]
        raise UsageError(
            f"started by {source}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            where=f"process environment; set: {', '.join(present)}",
            fix="set all of them, or none to start the ranks from here",
            code="L02",
        )


def number(environ: Environ, name: str, default: int | None = None) -> int:
    """A variable as a number. Raises UsageError L02."""
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name} is {text!r}, not a number",
            where=f"process environment: {name}",
            fix=f"unset {name}, or start with torchrun, which sets it",
            code="L02",
        ) from None


def checked(place: Started) -> Started:
    """The place itself. Raises UsageError L02 where its numbers cannot be."""
    if place.role is Role.TRAINER and (
        not 0 <= place.rank < place.world or not 0 <= place.local_rank < place.local_world <= place.world
    ):
        raise UsageError(
            f"{place.source} says rank {place.rank} of {place.world}, {place.local_rank} of {place.local_world} here",
            where="process environment",
            fix="ranks count from 0 and stay below the size",
            code="L02",
        )
    if not 0 <= place.port < 1 << 16:
        what = f"{place.source} says port {place.port}"
        raise UsageError(what, where="process environment: MASTER_PORT", fix="a port below 65536", code="L02")
    return place
