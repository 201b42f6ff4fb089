"""The ranks of a run meet anew: what each is told. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RankMeeting:
    """Who meets, from the eyes of one rank. epoch: how often they have met before. rank, world: its number from now on,
    and of how many that train. present: how many meet; those from `world` on only hand over what they hold, and leave.
    local_rank, local_world: among those of its host. spread: what is new of how the run is spread, by key."""

    epoch: int
    rank: int
    world: int
    present: int
    local_rank: int
    local_world: int
    spread: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "RankMeeting":
        """What `as_json` made."""
        return cls(**{name: record[name] for name in cls.__slots__})

    def as_json(self) -> dict[str, Any]:
        """As a rank gets it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A meeting, and where: a torch Store of this epoch alone, so that no word of an earlier one is read."""

    meeting: RankMeeting
    store: Any

    @property
    def epoch(self) -> int:
        return self.meeting.epoch


class Paused(Exception):
    """All ranks have ended with one step, to meet anew: nothing of the run is under way."""
