"""What ranks put down for who asks from outside, held to the form in which they put it down. No torch.

The files may be anybody's: a folder that others can write to, a run from elsewhere, another version. What has another
form counts as not said, and no text of them reaches a terminal as a command.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from unisono.spec.doubtful import plain

FORM = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Text = Annotated[str, AfterValidator(lambda text: plain(text, 4000))]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Rank = Annotated[int, Field(ge=0, lt=1 << 20)]
_Seconds = Annotated[float, Field(ge=0)]
_Frame = Annotated[tuple[Text, Count, Text], Field(strict=False)]  # JSON has lists alone
_Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,15})$")]  # JSON has texts for keys


class _StatusForm(BaseModel):
    model_config = FORM
    rank: Rank
    state: Literal["runs", "waits", "ended", "stopped", "silent", "gone"]
    host: Text = ""
    part: Text = ""
    op: Text = ""
    place: Text = ""
    odd: int = 0
    idle: _Seconds = 0.0
    step: Count = 0


class _CallForm(BaseModel):
    model_config = FORM
    says: Text
    over: bool
    part: Text
    op: Text
    place: Text
    odd: int


class _GroupForm(BaseModel):
    model_config = FORM
    ranks: Annotated[list[Rank], Field(max_length=1 << 20)]
    axis: Text
    begun: Count | None
    calls: dict[_Number, _CallForm]


class _KernelForm(BaseModel):
    model_config = FORM
    state: Text = ""
    within: Text = Field(default="", alias="in")
    tracer: Count = 0


class _ReportForm(BaseModel):
    model_config = FORM
    token: str
    status: _StatusForm
    frames: list[_Frame] = []
    calls: dict[Text, _GroupForm] = {}
    kernel: _KernelForm = _KernelForm()
    since: _Seconds | None = None
    usual: _Seconds | None = None
    clashed: bool = False


def report(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a rank answered, or another rank said of it; None if it is not in this form."""
    with suppress(ValidationError, RecursionError):
        return _ReportForm.model_validate(content).model_dump(by_alias=True, exclude_unset=True)
    return None
