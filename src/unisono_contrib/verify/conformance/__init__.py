"""What every member of a family owes, whoever wrote it: a suite a family, `unisono verify --conformance NAME`.

A suite is a file named as its family's noun, as `model_kind`, with `faults(member, folder, text)`: a sentence for each
thing that is wrong. text: the member as a plan or recipe names it. folder: empty, to write into. Families without a
suite of their own are held to what all members owe.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import unisono_contrib
from unisono.spec import errors, finder
from unisono.spec.errors import UsageError
from unisono.spec.family import Family, Member
from unisono.spec.finder import UnfinishedClass

_SOURCES = (Path(errors.__file__).parents[1], Path(unisono_contrib.__file__).parent)
_DECLARED = re.compile(r"^(\w+): Family\[", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Conformity:
    """A member and what is wrong with it, a sentence each. suites: by which it was judged."""

    member: str
    family: str
    suites: tuple[str, ...]
    faults: tuple[str, ...]


@cache
def families() -> tuple[Family[Member], ...]:
    """All families of the source, in the order of their files."""
    known: list[Family[Member]] = []
    files = [(home, path) for home in _SOURCES for path in sorted(home.rglob("*.py"))]
    for home, path in files:
        for name in _DECLARED.findall(path.read_text(encoding="utf-8")):
            module = ".".join(path.relative_to(home.parent).with_suffix("").parts)
            known.append(getattr(import_module(module.removesuffix(".__init__")), name))
    return tuple(known)


def family_of(text: str) -> Family[Member]:
    """The family whose member a text names, by its name, by `KEY=NAME` where several families have such a name, or
    by the base class in a user's file. Raises UsageError."""
    key, rest = split_key(text)
    name, _ = finder.split(finder.apart(rest)[0])
    candidates = [family for family in families() if key in ("", word_of(family))]
    there = [family for family in candidates if name in family.names()]
    if len(there) > 1:
        raise UsageError(
            f"{name} is a member of several families",
            where="flag --conformance",
            fix=" or ".join(f"--conformance {word_of(family)}={name}" for family in there),
            code="C04",
        )
    for family in candidates if ".py:" in name else there:
        try:
            family.find(name)
        except UnfinishedClass:
            raise
        except UsageError as error:
            if error.code == "C03":
                raise
            continue
        return family
    raise UsageError(
        f"{name} is no member of any family",
        where="flag --conformance",
        fix="FILE.py:NAME, a subclass of one of " + ", ".join(f.base.__name__ for f in families())
        if ".py:" in name
        else "FILE.py:NAME, or a name of ours, such as " + " ".join(families()[0].names()),
        code="C04",
    )


def word_of(family: Family[Member]) -> str:
    """The word before `=` that a plan, a recipe or this flag knows a family by: `collective`, `cp_kind`, `starter`."""
    _, dot, key = family.key.rpartition(".")
    return key if dot else family.noun


def split_key(text: str) -> tuple[str, str]:
    """(KEY, the rest) of `KEY=NAME:options`; ("", the text) where it says no family."""
    key, equals, rest = text.partition("=")
    return (key, rest) if equals and key in {word_of(family) for family in families()} else ("", text)


def held(text: str, folder: Path) -> Conformity:
    """The member that a text names (`topk:ratio=0.1`, `mine.py:Own`), judged. Raises UsageError for no such member."""
    family = family_of(text)
    member = family.read(split_key(text)[1], "flag --conformance")
    # What stands around a member is made of it, and has no name of its own.
    suites, sentences = (
        ["member"],
        [] if family.marks and finder.apart(text)[1] else list(_of_any(family, member)),
    )
    file = family.noun.replace(" ", "_").replace("-", "_")
    if file in finder.names_in(__name__):
        suites.append(family.noun)
        suite = import_module(f"{__name__}.{file}")
        sentences += suite.faults(member, folder, split_key(text)[1])
    return Conformity(text, family.noun, tuple(suites), tuple(sentences))


def _of_any(family: Family[Member], member: Member) -> Iterator[str]:
    kind = type(member)
    if not member.summary():
        yield "its class has no docstring, of which the first line is its help"
    for option, field in kind.model_fields.items():
        if not field.description:
            yield f"its option {option} has no description"
    if kind.name in family.names() and family.find(kind.name) is not kind:
        yield f"its name {kind.name} is that of another {family.noun}"
    if member != kind.model_validate(member.model_dump()):
        yield "made again from its options it is another"
