"""Families: schedules, policies, codecs, model kinds and all else of which there are several, found by name.

A member is one file of its family's package (or a folder whose `__init__.py` declares it), named as the contract names
it: `topk` is `topk.py`, and `1f1b`, which Python cannot import, is `one_f_one_b.py`. A member in a user's own file is
named by import path: `mine.py:NAME`. Files whose name begins with `_` are no members.

The file holds one class. Its fields are the member's options: `topk:ratio=0.01` is `TopK(ratio=0.01)`. It imports no
torch; what needs torch is imported inside the method that binds it.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from unisono.spec.errors import UsageError

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Member(BaseModel):
    """One member with its options, which are its fields: typed, frozen, each described in a line.

    name: as plan, recipe or command line write it. main: the option that may stand without its name, so that
    `cast:bf16` is `cast:dtype=bf16`; "" where there is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    main: ClassVar[str] = ""

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring, for help and tables."""
        return (inspect.getdoc(cls) or "").partition("\n")[0]


M = TypeVar("M", bound=Member)


@dataclass(frozen=True, slots=True)
class Family(Generic[M]):
    """All members of one kind.

    noun: for messages, "policy". package: where the members lie, "unisono.sync". base: what a member is a subclass of.
    key: where its names are written, "plan.sync". codes: of the errors for an unknown name and for a wrong option.
    """

    noun: str
    package: str
    base: type[M]
    key: str
    codes: tuple[str, str] = ("C06", "C06")

    def names(self) -> tuple[str, ...]:
        """Names of the members of the package, sorted; no member is imported for it."""
        path = importlib.import_module(self.package).__path__
        return tuple(
            sorted(name_of(m.name) for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))
        )

    def find(self, name: str, where: str = "") -> type[M]:
        """The member's class, by its name or by `FILE.py:NAME`. Raises UsageError."""
        if ".py:" in name:
            path, _, attribute = name.rpartition(":")
            found = getattr(_loaded(path, self.noun, where or self.key), attribute, None)
            if not (isinstance(found, type) and issubclass(found, self.base)):
                raise UsageError(
                    f"{path} has no {self.noun} {attribute}",
                    where=where or self.key,
                    fix=f"a subclass of {self.base.__module__}.{self.base.__name__} under this name",
                    code=self.codes[0],
                )
            return found
        names = self.names()
        if name not in names:
            close = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(
                f"there is no {self.noun} {name!r}{hint}",
                where=where or self.key,
                fix=f"one of: {' '.join(names)}, or FILE.py:NAME",
                code=self.codes[0],
            )
        module = importlib.import_module(f"{self.package}.{module_of(name)}")
        return _member_of(module, self.base)

    def read(self, text: str, where: str = "") -> M:
        """The member that `NAME:key=value,key=value` or `FILE.py:NAME:key=value` means. Raises UsageError."""
        name, options = split(text)
        member = self.find(name, where)
        return self.made(member, _keyed(member, options), where or f"{self.key}={text}", strings=True)

    def made(self, member: type[M], options: Mapping[str, Any], where: str, *, strings: bool = False) -> M:
        """The member with these options, as text (`strings`) or typed. Raises UsageError, naming the first mistake."""
        try:
            return member.model_validate_strings(options) if strings else member.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            option = ".".join(map(str, first["loc"]))
            what = f"{self.noun} {member.name}: {option}: {first['msg'].lower()}"
            if first["type"] == "extra_forbidden":
                what = f"{self.noun} {member.name} takes no option {option}"
            elif first["type"] == "missing":
                what = f"{self.noun} {member.name} lacks its option {option}"
            takes = ", ".join(f"{key} ({field.description})" for key, field in member.model_fields.items())
            raise UsageError(
                what, where=where, fix=f"its options: {takes or 'none'}", code=self.codes[1]
            ) from None


def split(text: str) -> tuple[str, str]:
    """(name, options) of `NAME:options` and of `FILE.py:NAME:options`."""
    path, py, rest = text.partition(".py:")
    if not py:
        name, _, options = text.partition(":")
        return name, options
    name, _, options = rest.partition(":")
    return f"{path}.py:{name}", options


def _keyed(member: type[Member], options: str) -> dict[str, str]:
    """`a=1,b=2` as a mapping; a member whose only option is `main` takes all the text, whatever is in it."""
    if member.main and len(member.model_fields) == 1 and not options.startswith(f"{member.main}="):
        return {member.main: options} if options else {}
    keyed: dict[str, str] = {}
    for part in filter(None, options.replace(":", ",").split(",")):
        key, equals, value = part.partition("=")
        keyed[key if equals else member.main or part] = value if equals else part
    return keyed


def _member_of(module: Any, base: type[M]) -> type[M]:
    """The one class of `module` that is a member: a subclass of `base`, made there and not private."""
    for name, value in vars(module).items():
        made_here = isinstance(value, type) and value.__module__ == module.__name__
        if made_here and issubclass(value, base) and not name.startswith("_"):
            return value
    raise TypeError(f"{module.__name__} declares no {base.__name__}")


def _loaded(path: str, noun: str, where: str) -> Any:
    """The module of a user's file, loaded once a process."""
    full = str(Path(path).resolve())
    name = f"unisono_user_{Path(path).stem}_{abs(hash(full)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None or not Path(full).is_file():
        raise UsageError(f"no such file: {path}", where=where, fix=f"the path of a {noun}'s file", code="C03")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def module_of(name: str) -> str:
    """The module's name for a contract name: `1f1b` -> `one_f_one_b`, others unchanged."""
    if not name[:1].isdigit():
        return name
    return "_".join(_DIGITS[int(c)] if c.isdigit() else c for c in name)


def name_of(module: str) -> str:
    """The contract's name of a module: `one_f_one_b` -> `1f1b`, others unchanged."""
    words: Sequence[str] = module.split("_")
    if words[0] not in _DIGITS:
        return module
    return "".join(str(_DIGITS.index(word)) if word in _DIGITS else word for word in words)
