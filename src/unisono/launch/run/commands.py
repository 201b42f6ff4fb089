"""What the state machine asks of the loop that plays it: values. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unisono.launch.run.membership import Role
from unisono.spec.rendezvous import RankMeeting

HostVerb = Literal["prepare", "probe", "end", "close", "start"]


@dataclass(frozen=True, slots=True)
class OnHost:
    """Something that is done with a host. prepare: let it read the run's data, before workers are asked of it. probe:
    measure the link to it. end: end its fork server, and with it all workers there. close: it is gone, and nothing is
    sent to it any more. start: the supervisor's own host anew, whose fork server is gone."""

    host: int
    verb: HostVerb


@dataclass(frozen=True, slots=True)
class Spawn:
    """Fork a worker. index: its place on the host. meeting: what it is told of the first meeting it comes to. joins:
    takes a lost one's place among others that live. settled: what is new of the run's argument."""

    worker: int
    host: int
    index: int
    meeting: RankMeeting
    joins: bool = False
    settled: Mapping[str, Any] = field(default_factory=dict)
    role: Role = Role.TRAINER


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker by SIGKILL; nothing milder is heard inside a collective."""

    worker: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Close the lines of a worker, which has no part in the run any more."""

    worker: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Say a word to a worker: stop, hurry, move or leave."""

    worker: int
    word: str


@dataclass(frozen=True, slots=True)
class Regroup:
    """Workers meet anew. calls: those that live, each with its view of the meeting. What the store held is void."""

    epoch: int
    calls: Mapping[int, RankMeeting]


@dataclass(frozen=True, slots=True)
class AskStacks:
    """Let workers print where their main thread is."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadStacks:
    """Answer with `StacksRead`, of these workers."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Show:
    """Report an event to people and to the run's history. rank: -1 for the run as a whole."""

    rank: int
    event: Mapping[str, Any]


Command = OnHost | Spawn | Kill | Forget | Tell | Regroup | AskStacks | ReadStacks | Show
