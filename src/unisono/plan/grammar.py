"""The words of a plan: which keys and values the contract knows, and which of them this version plays.

A value is a name with options after a colon and marks after a plus sign:

    topk:ratio=0.01+ef      name "topk", options {"ratio": "0.01"}, marks ("ef",)
    cast:bf16               name "cast", options {"": "bf16"}
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from unisono.spec.errors import Problem

SIZES = ("dp", "shard", "zero", "pp", "micros", "tp", "cp", "ep")

VALUES: Mapping[str, tuple[str, ...]] = {
    "schedule": (
        "accumulate", "gpipe", "1f1b", "interleaved", "looped_bfs",
        "zb1p", "zb2p", "zbv", "dualpipe", "dualpipev", "pipedream",
    ),
    "cp_kind": ("ring", "ulysses"),
    "sync": (
        "every_step", "canonical", "delayed", "local_sgd", "diloco", "gossip",
        "quorum", "ssp", "async", "hogwild", "adaptive",
    ),
    "collective": ("auto", "ring", "tree", "halving_doubling", "hierarchical", "torus", "engine"),
    "codec": ("plain", "cast", "int8", "qsgd", "sign", "ternary", "topk", "threshold", "randomk", "block", "powersgd"),
    "precision": ("fp32", "bf16", "fp16", "fp64"),
    "recompute": ("none", "selective", "full", "auto"),
    "offload": ("none", "optimizer", "params", "activations"),
}  # fmt: skip

BUILT: Mapping[str, tuple[str, ...]] = {
    "schedule": ("accumulate", "gpipe", "1f1b"),
    "cp_kind": ("ring", "ulysses"),  # means nothing while cp=1
    "sync": ("every_step", "canonical"),
    "collective": ("auto", "engine"),
    "codec": ("plain",),
    "precision": ("fp32", "bf16", "fp64"),
    "recompute": ("none", "full"),
    "offload": ("none",),
}

KEYS = (
    "dp", "shard", "zero", "pp", "schedule", "micros", "tp", "cp", "ep", "cp_kind",
    "sync", "collective", "codec", "precision", "recompute", "offload",
)  # fmt: skip

_WITH_OPTIONS = ("schedule", "sync", "codec")
_WITH_MARKS = ("codec",)
_MARKS = ("ef", "mc")
_NEEDS = {"local_sgd": "h", "diloco": "h", "quorum": "k", "ssp": "s", "powersgd": "r", "interleaved": "v"}
_COUNTS = ("v", "h", "k", "s", "r")
_NAME = re.compile(r"[a-z0-9_]+")
_SHAPE = re.compile(r"(?P<name>[^:+]*)(?::(?P<options>.*?))?(?P<marks>(?:\+[A-Za-z]\w*)*)")


@dataclass(frozen=True, slots=True)
class Choice:
    """A value taken apart; an option without a name (`cast:bf16`) has the key ""."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


def choice(text: str) -> Choice:
    """Takes `name:key=value,key=value+mark` apart. Whatever the text, something is returned."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        return Choice(text)
    options = {}
    for part in filter(None, (found["options"] or "").split(",")):
        key, equals, value = part.partition("=")
        options[key if equals else ""] = value if equals else key
    return Choice(found["name"], options, tuple(filter(None, found["marks"].split("+"))))


def nearest(word: str, words: Sequence[str]) -> str:
    """The word that was probably meant, or ""; among near ones, one with the same first letter."""
    close = get_close_matches(word.lower(), words, n=3, cutoff=0.5)
    same = [c for c in close if c[0] == word[:1].lower()]
    return (same or close or [""])[0]


def meant(word: str, words: Sequence[str]) -> str:
    """`, did you mean X?` or nothing."""
    close = nearest(word, words)
    return f"; did you mean {close}?" if close else ""


def size_problem(key: str, value: object, where: str) -> Problem | None:
    """What is wrong with a number of the plan, if anything: its type first, then its range."""
    if key == "micros" and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        return Problem(
            "P03", f"{key}={value} is not a whole number", where, f"write {key}=N, N a whole number"
        )
    if key == "zero" and value not in (1, 2, 3):
        return Problem(
            "P03",
            f"zero={value} is none of 1, 2, 3",
            where,
            "zero=1 shards the optimiser, 2 gradients too, 3 parameters too",
        )
    if key == "dp" and value == -1:
        return None
    if value < 1:
        least = "at least 1, or -1 to fill the world" if key == "dp" else "at least 1"
        return Problem(
            "P03",
            f"{key}={value} is out of range: it is {least}",
            where,
            f"write {key}=1, or leave {key} out",
        )
    return None


def value_problems(key: str, text: object, where: str) -> list[Problem]:
    """What is wrong with a named value of the plan: an unknown name, a malformed option."""
    if not isinstance(text, str) or not text or any(c.isspace() for c in text):
        return [Problem("P03", f"{key}={text!r} is not a word", where, f"one of: {' '.join(VALUES[key])}")]
    got = choice(text)
    if got.name not in VALUES[key]:
        what = f"{key}={text} is not known{meant(got.name, VALUES[key])}"
        return [Problem("P04", what, where, f"one of: {' '.join(VALUES[key])}")]
    problems = []
    if (got.options and key not in _WITH_OPTIONS) or (":" in text and not got.options):
        problems.append(
            Problem(
                "P05", f"{key}={text}: {got.name} takes no such options", where, f"write {key}={got.name}"
            )
        )
    for mark in got.marks:
        if key not in _WITH_MARKS or mark not in _MARKS:
            problems.append(
                Problem(
                    "P05",
                    f"{key}={text}: +{mark} is not known",
                    where,
                    "codecs take +ef (error feedback) and +mc (momentum correction)",
                )
            )
    problems += _option_problems(key, text, got, where)
    return problems


def _option_problems(key: str, text: str, got: Choice, where: str) -> list[Problem]:
    problems = []
    needed = _NEEDS.get(got.name)
    if needed and needed not in got.options and got.name != "interleaved":
        problems.append(
            Problem(
                "P05",
                f"{key}={text} lacks its option {needed}",
                where,
                f"for example {key}={got.name}:{needed}=8",
            )
        )
    for option, value in got.options.items():
        bad = (option in _COUNTS and not (value.isascii() and value.isdigit() and int(value) > 0)) or (
            option == "ratio" and not _is_share(value)
        )
        if bad or not value or (option and not _NAME.fullmatch(option)):
            kind = "a share in (0, 1]" if option == "ratio" else "a whole number of at least 1"
            problems.append(
                Problem(
                    "P05", f"{key}={text}: {option}={value} is not {kind}", where, f"give {option} as {kind}"
                )
            )
    return problems


def _is_share(text: str) -> bool:
    try:
        return 0.0 < float(text) <= 1.0
    except ValueError:
        return False
