"""What ranks put down for who asks from outside, held to the form in which they put it down. No torch.

The files may be anybody's: a folder that others can write to, a run from elsewhere, another version. What has another
form counts as not said, and no text of them reaches a terminal as a command.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from unisono.spec.doubtful import plain

_FORM = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Text = Annotated[str, AfterValidator(lambda text: plain(text, 4000))]
_Count = Annotated[int, Field(ge=0, le=1 << 53)]
_Rank = Annotated[int, Field(ge=0, lt=1 << 20)]
_Seconds = Annotated[float, Field(ge=0)]
_Frame = Annotated[tuple[_Text, _Count, _Text], Field(strict=False)]  # JSON has lists alone
_Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,15})$")]  # JSON has texts for keys


class _LivingForm(BaseModel):
    model_config = _FORM
    rank: _Rank
    world: Annotated[int, Field(ge=1, le=1 << 20)]
    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    start: _Count
    host: _Text
    home: list[Any]
    main: Annotated[int, Field(ge=0, lt=1 << 64)]
    lines: Annotated[int, Field(ge=-1, lt=1 << 31)]
    run: _Text
    began: float
    private: bool = False


class _StandForm(BaseModel):
    model_config = _FORM
    rank: _Rank
    state: Literal["runs", "waits", "ended", "stopped", "silent", "gone"]
    host: _Text = ""
    part: _Text = ""
    op: _Text = ""
    place: _Text = ""
    odd: int = 0
    idle: _Seconds = 0.0
    step: _Count = 0


class _CallForm(BaseModel):
    model_config = _FORM
    says: _Text
    over: bool
    part: _Text
    op: _Text
    place: _Text
    odd: int


class _GroupForm(BaseModel):
    model_config = _FORM
    ranks: Annotated[list[_Rank], Field(max_length=1 << 20)]
    axis: _Text
    begun: _Count | None
    calls: dict[_Number, _CallForm]


class _KernelForm(BaseModel):
    model_config = _FORM
    state: _Text = ""
    within: _Text = Field(default="", alias="in")
    tracer: _Count = 0


class _SaidForm(BaseModel):
    model_config = _FORM
    token: str
    status: _StandForm
    frames: list[_Frame] = []
    calls: dict[_Text, _GroupForm] = {}
    kernel: _KernelForm = _KernelForm()
    since: _Seconds | None = None
    usual: _Seconds | None = None
    clashed: bool = False


def living(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of `alive.RankProcess`; None where they are not in its form."""
    return _in_form(_LivingForm, content)


def report(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a rank answered, or another one said of it; None where it is in no such form."""
    return _in_form(_SaidForm, content)


def _in_form(form: type[BaseModel], content: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return form.model_validate(content).model_dump(by_alias=True, exclude_unset=True)
    except (ValidationError, RecursionError):
        return None
