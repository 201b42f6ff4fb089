"""Families: policies, codecs, model kinds and all else of which there are several, found by name.

A member's file (see `spec.finder`) holds one class. Its fields are the member's options: `topk:ratio=0.01` is
`TopK(ratio=0.01)`. It imports no torch; what needs torch is imported inside the method that binds it.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from unisono.spec.errors import UsageError
from unisono.spec.finder import Finder, apart, split
from unisono.spec.paths import names_something, parted
from unisono.spec.words import meant


class Member(BaseModel):
    """One member with its options, which are its fields: typed, frozen, each described in a line.

    name: as plan, recipe or command line write it. main: the option that may stand without its name, so that
    `cast:bf16` is `cast:dtype=bf16`; "" where there is none. takes_path: `main` names
    files, whatever letters these have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    main: ClassVar[str] = ""
    takes_path: ClassVar[bool] = False

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring, for help and tables."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]


M = TypeVar("M", bound=Member)


class Mark(Member, ABC):
    """What may stand around a member of a family: `+ef` in `topk:ratio=0.01+ef`, with options as members have them."""

    @abstractmethod
    def around(self, member: Any) -> Any:
        """A member of the same family, which does what the mark says and has `member` do the rest."""

    def misfit(self, member: Any) -> str:
        """Why it cannot stand around this member; "" where it can."""
        return ""


@dataclass(frozen=True, slots=True)
class Family(Finder[M]):
    """All members of one kind, each with its options. marks: the package of what may stand around them, each a `Mark`
    under the name of its file; "" where nothing may."""

    marks: str = ""

    def marked(self) -> Finder[Mark]:
        """What may stand around members of this family."""
        return Finder(f"mark of a {self.noun}", self.marks, Mark, self.key, (self.codes[1], self.codes[1]))

    def listed(self) -> str:
        """All that its key may say, for help and schema."""
        mains = {name: self.find(name).main for name in self.names()}
        named = (f"{name}:{main.upper()}" if main else name for name, main in mains.items())
        return " | ".join((*named, "FILE.py:NAME"))

    def read(self, text: str, where: str = "") -> M:
        """The member that `NAME:key=value,key=value` or `FILE.py:NAME:key=value` means, with the marks behind it, the
        first one the nearest. Raises UsageError."""
        body, marks = apart(text) if self.marks else (text, ())
        head = body.partition(":")
        name, options = (head[0], head[2]) if head[0] in self.names() else split(body)
        member, at = self.find(name, where), where or f"{self.key}={text}"
        read_member = self.with_options(member, _keyed(member, options), at, strings=True)
        for said in marks:
            read_member = self._around(read_member, said, at)
        return read_member

    def _around(self, member: M, said: str, where: str) -> M:
        """`member` with one mark, as `ef` or `mc:momentum=0.9`."""
        name, options = split(said)
        kind = self.marked().find(name, where)
        mark = self.with_options(kind, _keyed(kind, options), where, strings=True)  # type: ignore[arg-type]
        if why := mark.misfit(member):  # type: ignore[attr-defined]
            fix = f"leave +{name} out"
            raise UsageError(
                f"+{name} around {self.noun} {member.name}: {why}", where=where, fix=fix, code="P23"
            )
        return mark.around(member)  # type: ignore[attr-defined]

    def among(self, text: str, section: Mapping[str, Any], where: str = "") -> M:
        """The member that `text` names, its options from the keys of a recipe's section that it has as fields; an
        option behind the name counts more. Raises UsageError."""
        name, behind = split(text)
        member = self.find(name, where)
        options = {key: section[key] for key in member.model_fields if key in section}
        if behind:
            written = self.read(text, where)
            options |= {key: getattr(written, key) for key in written.model_fields_set}
        return self.with_options(member, options, where or f"{self.key}={text}")

    def with_options(
        self, member: type[M], options: Mapping[str, Any], where: str, *, strings: bool = False
    ) -> M:
        """The member with these options, as text (`strings`) or typed. Raises UsageError, naming the first mistake."""
        try:
            return member.model_validate_strings(options) if strings else member.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            option = ".".join(map(str, first["loc"]))
            what = f"{self.noun} {member.name}: {option}: {first['msg'].lower()}"
            if first["type"] == "extra_forbidden":
                hint = meant(option, member.model_fields)
                what = f"{self.noun} {member.name} takes no option {option}{hint}"
            elif first["type"] == "missing":
                what = f"{self.noun} {member.name} lacks its option {option}"
            takes = ", ".join(f"{key} ({field.description})" for key, field in member.model_fields.items())
            raise UsageError(
                what, where=where, fix=f"its options: {takes or 'none'}", code=self.codes[1]
            ) from None


def one_of(family: Family[Any]) -> AfterValidator:
    """Of a key's text: it names a member of the family, with options behind its name or without."""

    def known(text: str) -> str:
        try:
            family.read(text)
        except UsageError as error:
            raise PydanticCustomError("no_member", "{what}", {"what": error.what}) from error
        return text

    return AfterValidator(known)


def _keyed(member: type[Member], options: str) -> dict[str, str]:
    """`a=1,b=2` as a mapping; a member whose only option is `main` takes all the text, whatever is in it, and one whose
    `main` is a path as much as names something."""
    if member.main and len(member.model_fields) == 1 and not options.startswith(f"{member.main}="):
        return {member.main: options} if options else {}
    keyed: dict[str, str] = {}
    if member.takes_path and (
        options.partition("=")[0] not in member.model_fields or names_something(options)
    ):
        keyed[member.main], options = parted(options, member.model_fields)
    plain = options if "://" in options else options.replace(":", ",")  # an address has colons of its own
    for part in filter(None, plain.split(",")):
        key, equals, value = part.partition("=")
        keyed[key if equals else member.main or part] = value if equals else part
    return keyed
