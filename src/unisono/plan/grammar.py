"""The words of a plan: which keys and values the contract knows, and which of them this version plays.

A value is a name with options after a colon and marks after a plus sign:

    topk:ratio=0.01+ef      name "topk", options {"ratio": "0.01"}, marks ("ef",)
    topk+mc:warmup=100+ef   name "topk", marks ("mc", "ef"), of which the first has options of its own
    cast:bf16               name "cast", options {"": "bf16"}
    mine.py:Own:h=8         the member `Own` of a user's file, options {"h": "8"}

Names of `schedule`, `cp_kind`, `sync`, `collective` and `codec` are those of the members that their packages hold,
looked for and imported by name, since they stand on higher floors.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from unisono.plan.grid import Grid
from unisono.spec.elsewhere import remedy_for
from unisono.spec.errors import Problem, UsageError
from unisono.spec.finder import apart, family_in, names_in, split
from unisono.spec.words import meant, whole

SIZES = ("dp", "shard", "zero", "pp", "micros", "tp", "cp", "ep")

KEYS = (
    "dp", "shard", "zero", "pp", "schedule", "micros", "tp", "cp", "ep", "cp_kind",
    "sync", "collective", "codec", "precision", "recompute", "offload", "blocks",
)  # fmt: skip

PACKAGES: Mapping[str, str] = {
    "schedule": "unisono.programs.schedules",
    "cp_kind": "unisono.parallel.attend",
    "sync": "unisono.sync",
    "collective": "unisono.comm.collectives",
    "codec": "unisono.codecs",
}
_WORDS: Mapping[str, tuple[str, ...]] = {
    "precision": ("fp32", "bf16", "fp16", "fp64"),
    "recompute": ("none", "selective", "full", "auto"),
    "offload": ("none", "optimizer", "params", "activations"),
}
_AWAY = {"to": ("host", "disk")}
# Options of words that have no member: what they may say, and () where it is a whole number of at least 0, or one for
# each stage with strokes between.
_TAKES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "recompute=auto": {"full": (), "selective": ()},
    "offload=optimizer": _AWAY,
    "offload=params": _AWAY,
    "offload=activations": _AWAY,
}
MOST = 10_000_000
"""Largest number in a plan; larger ones are slips of a finger, or of a script."""
NAMED = tuple(key for key in KEYS if key not in (*SIZES, "blocks"))
"""Keys whose values are names; `blocks` is a list of ranges, see `plan.blocks`."""
MARKS: Mapping[str, tuple[str, ...]] = {"offload": ("activations",)}
MARKED: Mapping[str, str] = {"codec": "unisono.codecs._marks"}
"""Of a key whose members may have marks: the package where these lie, one a file."""

_OWN = re.compile(r".+\.py:[A-Za-z_]\w*")


@cache
def known(key: str) -> tuple[str, ...]:
    """All names of a plan's key."""
    return tuple(names_in(PACKAGES[key])) if key in PACKAGES else _WORDS[key]


@dataclass(frozen=True, slots=True)
class Choice:
    """A value taken apart; an option without a name (`cast:bf16`) has the key ""."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


@cache
def choice(text: str) -> Choice:
    """Takes `name:key=value,key=value+mark` apart. Whatever the text, something is returned."""
    body, marks = apart(text)
    name, rest = split(body)
    options = {}
    for part in filter(None, rest.replace(":", ",").split(",")):
        key, equals, value = part.partition("=")
        options[key if equals else ""] = value if equals else key
    return Choice(name, options, tuple(mark.partition(":")[0] for mark in marks))


@cache
def marks_of(key: str) -> tuple[str, ...]:
    """What may stand behind a plus sign in values of a plan's key."""
    return names_in(MARKED[key]) if key in MARKED else MARKS.get(key, ())


def families() -> str:
    """A line for each key whose names are members, with these names; no member is imported for it."""
    lines = (f"  {key:<11} {' '.join(names_in(package))}" for key, package in PACKAGES.items())
    return "\n".join(("names in a plan (or FILE.py:NAME, a member of your own):", *lines))


@lru_cache(maxsize=4096)
def member(key: str, text: str) -> Any:
    """The member that a plan's value names, with its options; None for a word that has no family. Raises UsageError."""
    if key not in PACKAGES:
        return None
    return family_in(PACKAGES[key]).read(text if key in MARKED else apart(text)[0], f"plan.{key}")


@lru_cache(maxsize=4096)
def problem_of(key: str, text: str) -> Problem | None:
    """What keeps a value of the plan from being played: no such file, or a wrong option in it."""
    try:
        member(key, text)
    except UsageError as error:
        return Problem(error.code, error.what, f"plan.{key}", error.fix)
    return None


def named(key: str, text: str) -> Any:
    """The member that a value names; None where there is none, or no such file, of which `problem_of` tells."""
    return None if problem_of(key, text) else member(key, text)


def size_problem(key: str, value: object, where: str) -> Problem | None:
    """What is wrong with a number of the plan, if anything: its type first, then its range."""
    if key == "micros" and value is None:
        return None
    if isinstance(value, str) and value.isdigit() and not value.isascii():
        what = f"{key}={value} is written in digits that look like 0 to 9 and are others"
        return Problem("P03", what, where, f"write {key}={int(value) if value.isdecimal() else 2}")
    if isinstance(value, bool) or not isinstance(value, int):
        return Problem(
            "P03", f"{key}={value} is not a whole number", where, f"write {key}=N, N a whole number"
        )
    if isinstance(value, Grid) and min(value.rows, value.columns) < 2:
        what = f"{key}={value} has one row or one column"
        return Problem("P03", what, where, f"write {key}={int(value)}")
    if key == "zero" and value not in (1, 2, 3):
        return Problem(
            "P03",
            f"zero={value} is none of 1, 2, 3",
            where,
            "zero=1 shards the optimiser, 2 gradients too, 3 parameters too",
        )
    if key == "dp" and value == -1:
        return None
    if value > MOST:
        what = f"{key}={value} is out of range: a plan counts to {MOST:,}"
        return Problem("P03", what, where, f"a smaller {key}")
    if value < 1:
        least = "at least 1, or -1 to fill the world" if key == "dp" else "at least 1"
        return Problem(
            "P03",
            f"{key}={value} is out of range: it is {least}",
            where,
            f"write {key}=N, as many ranks as share it: dp alone fills the world"
            if value == -1
            else f"write {key}=1, or leave {key} out",
        )
    return None


@lru_cache(maxsize=4096)
def value_problems(key: str, text: object, where: str) -> tuple[Problem, ...]:
    """What is wrong with a named value of the plan: an unknown name, a malformed option. Of a member in a user's file
    only the form is looked at: reading a plan runs no code of a user's."""
    if not isinstance(text, str) or not text or any(c.isspace() for c in text):
        return (Problem("P03", f"{key}={text!r} is not a word", where, f"one of: {' '.join(known(key))}"),)
    got, (body, marks) = choice(text), apart(text)
    problems = [
        Problem("P05", f"{key}={text}: +{mark} is not known", where, _marks_fix())
        for mark in marks
        if mark.partition(":" if key in MARKED else "\n")[0] not in marks_of(key)
        or got.name in (mark, "none")
    ]
    if key in PACKAGES and _OWN.fullmatch(got.name):
        return tuple(problems)
    if got.name not in known(key):
        one_of = f"one of: {' '.join(known(key))}{', or FILE.py:NAME' if key in PACKAGES else ''}"
        remedy = remedy_for(got.name) if key == "precision" else ""
        hint = "" if remedy else meant(got.name, known(key))
        what = f"{key}={text} is not known{hint}"
        return (Problem("P04", what, where, f"{one_of}{'; ' if remedy else ''}{remedy}"),)
    if takes := _TAKES.get(f"{key}={got.name}"):
        problems += _word_problems(f"{key}={text}", got, takes, where)
    elif ":" in body and (not got.options or key not in PACKAGES):
        what = f"{key}={text}: {got.name} takes no such options"
        problems.append(Problem("P05", what, where, f"write {key}={got.name}"))
    elif key in PACKAGES:
        try:
            family_in(PACKAGES[key]).read(text if key in MARKED and not problems else body, where)
        except UsageError as error:
            problems.append(Problem(error.code, f"{key}={text}: {error.what}", where, error.fix))
    return tuple(problems)


def _marks_fix() -> str:
    return "; ".join(
        f"{key} takes {' and '.join(f'+{mark}' for mark in marks_of(key))}" for key in (*MARKED, *MARKS)
    )


def _word_problems(
    word: str, got: Choice, takes: Mapping[str, tuple[str, ...]], where: str
) -> Iterator[Problem]:
    """Options of a word that is no member's name."""
    for option, value in got.options.items():
        values = takes.get(option)
        if values is None:
            what, fix = f"{word}: {got.name} has no option {option or value}", f"options: {' '.join(takes)}"
        elif values and value not in values:
            what, fix = f"{word}: {option}={value} is none of {' '.join(values)}", f"{option}={values[0]}"
        elif not values and not all(_is_count(part) for part in value.split("/")):
            what = f"{word}: {option}={value} is not a whole number, or one for each stage"
            fix = f"{option}=N, N at least 0, or {option}=N/N/..."
        else:
            continue
        yield Problem("P05", what, where, fix)


def _is_count(text: str) -> bool:
    number = whole(text)
    return number is not None and 0 <= number <= MOST
