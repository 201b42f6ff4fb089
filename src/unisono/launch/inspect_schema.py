"""What ranks put down for who asks from outside, held to the form in which they put it down. No torch.

The files may be anybody's: a folder that others can write to, a run from elsewhere, another version. What has another
form counts as not said, and no text of them reaches a terminal as a command.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from unisono.launch.rank_status import FORM, Count, Frame, Rank, RankStatus, Seconds, Text

_Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,15})$")]  # JSON has texts for keys


@dataclass(frozen=True)
class GroupCall:
    """One call of a group, as `begun.RecordedCollective` and the rank's lines tell of it. odd: how unusual it is."""

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    says: Text
    over: bool
    part: Text
    op: Text
    place: Text
    odd: int


@dataclass(frozen=True)
class GroupCalls:
    """What a rank has called in a group. begun: how many calls, None if nobody counts. calls: the latest, by number."""

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    ranks: Annotated[list[Rank], Field(max_length=1 << 20)]
    axis: Text
    begun: Count | None
    calls: dict[_Number, GroupCall]


@dataclass(frozen=True)
class RankReport:
    """What a rank answers, or another one says of it. frames: of its main thread, innermost first. calls: its latest
    calls in each group; None where somebody else speaks, who does not know them. kernel: what its kernel says. since:
    seconds since its last step, None if not known. usual: seconds that a step takes. clashed: whether its backend has
    got a message that does not fit."""

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    status: RankStatus
    frames: list[Frame] = field(default_factory=list)
    calls: dict[Text, GroupCalls] | None = None
    kernel: dict[Literal["state", "in", "tracer"], Text | Count] = field(default_factory=dict)
    since: Seconds | None = None
    usual: Seconds | None = None
    clashed: bool = False


_REPORT = TypeAdapter(RankReport)


def read_report(content: Mapping[str, Any]) -> RankReport | None:
    """The report in an answer; None if that is not in this form."""
    said = {key: value for key, value in content.items() if key != "token"}
    with suppress(ValidationError, RecursionError):
        return _REPORT.validate_json(json.dumps(said))  # strictly, it takes no lists for tuples
    return None
