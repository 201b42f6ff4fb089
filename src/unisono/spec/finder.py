"""Members of a family found by file name, without registration. Standard library only, so that help answers at once.

A member is one file of its family's package (or a folder whose `__init__.py` declares it), named as the contract names
it: `topk` is `topk.py`, and `1f1b`, which Python cannot import, is `one_f_one_b.py`. A member in a user's own file is
named by import path: `mine.py:NAME`. Files whose name begins with `_` are no members.

What few need lies in a sister package of the same distribution, `unisono_contrib`, with the same rooms: a family of
`unisono.codecs` has the members of `unisono_contrib.codecs` too. The core names that package here alone, and runs
without it.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from unisono.spec.elsewhere import remedy_for
from unisono.spec.errors import UsageError
from unisono.spec.frames import of_user
from unisono.spec.paths import file_and_name
from unisono.spec.runs import run_around
from unisono.spec.words import meant

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

CORE, SISTER = "unisono", "unisono_contrib"

_MARK = re.compile(r"[A-Za-z]\w*(?::[^/]*)?")

C = TypeVar("C")


class UnfinishedClass(UsageError):
    """A user's class that does not define what its base declares."""


@dataclass(frozen=True, slots=True)
class Finder(Generic[C]):
    """The classes of one kind.

    noun: for messages, "policy". package: where the members lie, "unisono.sync". base: what a member is a subclass of.
    key: where its names are written, "plan.sync". codes: of the errors for an unknown name and for a wrong option.
    folders: every member is a folder, and files beside them are their tools. wrap: (module, name) of what makes a
    member of a user's plain function, in the sister package; None where a member must be a class.
    """

    noun: str
    package: str
    base: type[C]
    key: str
    codes: tuple[str, str] = ("C04", "C04")
    folders: bool = False
    wrap: tuple[str, str] | None = None

    def names(self) -> tuple[str, ...]:
        """All members' names, as the contract spells them; nothing is imported for it."""
        return names_in(self.package, self.folders)

    def find(self, name: str, where: str = "") -> type[C]:
        """The member's class, by its name or by `FILE.py:NAME`. Raises UsageError."""
        if ".py:" in name:
            path, _, attribute = name.rpartition(":")
            member = getattr(_loaded(path, self.noun, where or self.key), attribute, None)
            if isfunction(member) and self.wrap is not None:
                module, wrap = self.wrap
                return getattr(contributed(module), wrap)(member, attribute)
            if not (isinstance(member, type) and issubclass(member, self.base)):
                function = "" if self.wrap is None else "a function, or "
                raise UsageError(
                    f"{path} has no {self.noun} {attribute}",
                    where=where or self.key,
                    fix=f"{function}a subclass of {self.base.__module__}.{self.base.__name__} under this name",
                    code=self.codes[0],
                )
            if lacks := _lacking(member):
                raise UnfinishedClass(
                    f"{self.noun} {attribute} lacks {lacks}",
                    where=path,
                    fix=f"define it, as {self.base.__module__}.{self.base.__name__} says",
                    code=self.codes[0],
                )
            return member
        names = self.names()
        if name not in names:
            remedy = f"; {known}" if self.noun == "sink" and (known := remedy_for(name)) else ""
            raise UsageError(
                f"there is no {self.noun} {name!r}{remedy or meant(name, names)}",
                where=where or self.key,
                fix=f"one of: {' '.join(names)}, or FILE.py:NAME",
                code=self.codes[0],
            )
        return _member_of(importlib.import_module(_modules_in(self.package, self.folders)[name]), self.base)


def names_in(package: str, folders: bool = False) -> tuple[str, ...]:
    """Names of a family's members, of the core and of the sister package; `package`, as `unisono.sync`, is not imported
    for it."""
    return tuple(_modules_in(package, folders))


@cache
def _modules_in(package: str, folders: bool) -> dict[str, str]:
    """Each member of a family, by name in order, and the module that declares it."""
    modules = {
        name_of(module.name): f"{home}.{module.name}"
        for home in (package, _beside(package))
        for module in pkgutil.iter_modules(_folders_of(home))
        if not module.name.startswith("_") and (module.ispkg or not folders)
    }
    return dict(sorted(modules.items()))


def _beside(module: str) -> str:
    """The name of what the sister package has beside a module of the core: `unisono_contrib.sync`."""
    return SISTER + module.removeprefix(CORE)


def _folders_of(package: str) -> Sequence[str]:
    """Where a package's files lie; nowhere if there is no such package."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of a package around it
        return ()
    return (spec.submodule_search_locations or ()) if spec else ()


def is_ours(module: str) -> bool:
    """Whether a module, by its name, belongs to the core or to its sister package."""
    return module.partition(".")[0] in (CORE, SISTER)


@cache
def sister(module: str) -> ModuleType | None:
    """What the sister package adds to a module of the core, given by its name: `unisono_contrib.parallel.passes` for
    `unisono.parallel.passes`. None where it adds nothing, or is not installed."""
    name = _beside(module)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def contributed(module: str) -> ModuleType:
    """As `sister`. Raises UsageError E01 where the sister package is not installed."""
    module_there = sister(module)
    if module_there is None:
        raise UsageError(
            f"{_beside(module)} is not installed",
            where=module,
            likely="unisono was installed without its sister package",
            fix="pip install unisono",
            code="E01",
        )
    return module_there


def door(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of the core that is the public address of one in the sister package."""

    def attribute(name: str) -> Any:
        if name.startswith("__"):  # asked by the import system
            raise AttributeError(name)
        return getattr(contributed(module), name)

    return attribute


@cache
def family_in(package: str) -> Any:
    """The family that a package declares."""
    (family,) = (v for v in vars(importlib.import_module(package)).values() if isinstance(v, Finder))
    return family


def _member_of(module: Any, base: type[C]) -> type[C]:
    """The one class of `module` that is a member: a subclass of `base`, defined there and not private."""
    for name, value in vars(module).items():
        defined_here = isinstance(value, type) and value.__module__ == module.__name__
        if defined_here and issubclass(value, base) and not name.startswith("_"):
            return value
    raise TypeError(f"{module.__name__} declares no {base.__name__}")


def _lacking(member: type) -> str:
    """What a user's class does not define and has to; "" where that is nothing."""
    methods = sorted(getattr(member, "__abstractmethods__", ()))
    named = isinstance(getattr(member, "name", None), str)
    return ", ".join([*([] if named else ["name"]), *methods])


def _loaded(path: str, noun: str, where: str) -> Any:
    """The module of a user's file, loaded once a process."""
    full = str(Path(path).resolve())
    name = f"unisono_user_{Path(path).stem}_{abs(hash(full)):x}"
    if name not in sys.modules:
        try:
            return executed(full, name, where, f"the path of a {noun}'s file")
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise of_user(error, f"the {noun}'s file", path) from error
    return sys.modules[name]


def executed(path: str | Path, name: str, where: str, fix: str = "check the path") -> ModuleType:
    """The module that a user's file makes, run anew and known under `name`, where dataclasses and pickles look for it.
    Raises UsageError C03 where there is no such file, and what the file raises."""
    if (run := run_around(Path(path))) is not None:
        raise UsageError(
            f"{path} is refused: it came with the run {run}, and code that comes with a run is not run",
            where=where,
            likely="a run folder holds what a run made, and never what it is made of",
            fix="a file of your own outside of it, once you have read it",
            code="W05",
        )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UsageError(f"no such file: {path}", where=where, fix=fix, code="C03")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def function_in(text: str, name: str, where: str) -> Callable[..., Any]:
    """The function that a user's `FILE.py:FUNCTION` means. name: see `executed`. where: the key that has the text.
    Raises UsageError C03 where there is none, and what the file raises."""
    path, _, function = text.rpartition(":")
    call = getattr(executed(path, name, where), function, None)
    if not callable(call):
        raise UsageError(
            f"{path} has no function {function}", code="C03", where=where, fix="FILE.py:FUNCTION"
        )
    return call


def split(text: str) -> tuple[str, str]:
    """(name, options) of `NAME:options` and of `FILE.py:NAME:options`."""
    parts = file_and_name(text)
    if parts is None:
        name, _, options = text.partition(":")
        return name, options
    name, _, options = parts[1].partition(":")
    return f"{parts[0]}:{name}", options


def apart(text: str) -> tuple[str, tuple[str, ...]]:
    """(the value without its marks, its marks with their options) of `topk:ratio=0.01+mc:momentum=0.8+ef`. Whatever the
    text, something is returned."""
    parts = text.split("+")
    first = len(parts)
    while first > 1 and _MARK.fullmatch(parts[first - 1]):
        first -= 1
    return "+".join(parts[:first]), tuple(parts[first:])


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
