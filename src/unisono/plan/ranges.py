"""`blocks=0-5:recompute=full,zero=2;6-11:offload=params`: some blocks are played otherwise than the other keys say.

A range names blocks by their numbers in the whole model, the last one included, so that stages may cut through it. What
a range leaves out is as the plan's own keys say, and so are stem, head and all blocks that no range names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from unisono.plan.grammar import value_problems
from unisono.spec.errors import Problem
from unisono.spec.words import meant

ALIKE = "alike"
"""The value that says nothing of any block."""
SAYS = ("recompute", "offload", "zero", "tp")
_EXAMPLE = "blocks=0-5:recompute=full,zero=2;6-11:offload=params"
_NUMBERS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclass(frozen=True, slots=True)
class Range:
    """Blocks `first` to `last`, and by key what is said of them."""

    first: int
    last: int
    said: tuple[tuple[str, str], ...]

    def says(self, key: str) -> str | None:
        """The value of a key; None where the range leaves it to the plan."""
        return next((value for name, value in self.said if name == key), None)

    def __str__(self) -> str:
        numbers = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{numbers}:{','.join(f'{key}={value}' for key, value in self.said)}"


@cache
def ranges_of(text: str) -> tuple[Range, ...]:
    """Of a value without problems."""
    return () if text == ALIKE else tuple(made for part in text.split(";") if (made := _range(part)))


def text_of(ranges: Iterator[Range] | tuple[Range, ...]) -> str:
    """The value that says these ranges; one of blocks that nothing is said of is left out."""
    return ";".join(str(one) for one in ranges if one.said) or ALIKE


def text_problems(text: object, where: str) -> Iterator[Problem]:
    """Everything that is wrong with a value of `blocks`, whatever the model has."""
    if not isinstance(text, str) or not text or any(c.isspace() for c in text):
        yield Problem("P03", f"blocks={text!r} is not a word", where, f"for example {_EXAMPLE}")
        return
    if text == ALIKE:
        return
    before = -1
    for part in text.split(";"):
        made = _range(part)
        if made is None:
            what = f"blocks={text}: {part!r} is not of the form FIRST-LAST:key=value"
            yield Problem("P05", what, where, f"for example {_EXAMPLE}, or blocks={ALIKE}")
            continue
        if made.last < made.first:
            what = f"blocks={text}: {made.first}-{made.last} ends before it begins"
            yield Problem("P05", what, where, f"{made.last}-{made.first}")
        elif made.first <= before:
            what = f"blocks={text}: {part} begins at {made.first}, and the range before it ends at {before}"
            yield Problem("P05", what, where, "ranges that ascend, no block in two of them")
        before = max(before, made.first, made.last)
        yield from _said_problems(text, made, where)


def _range(part: str) -> Range | None:
    numbers, colon, rest = part.partition(":")
    found = _NUMBERS.fullmatch(numbers)
    pairs = [one.partition("=") for one in rest.split(",")]
    if found is None or not colon or not all(key and equals and value for key, equals, value in pairs):
        return None
    first = int(found[1])
    return Range(first, int(found[2] or first), tuple((key, value) for key, _, value in pairs))


def _said_problems(text: str, one: Range, where: str) -> Iterator[Problem]:
    keys = [key for key, _ in one.said]
    for key, value in one.said:
        if key not in SAYS:
            what = f"blocks={text}: a range says nothing of {key}{meant(key, SAYS)}"
            yield Problem("P05", what, where, f"keys of a range: {' '.join(SAYS)}")
        elif keys.count(key) > 1:
            yield Problem(
                "P02", f"blocks={text}: {key} is given twice in one range", where, "keep one of them"
            )
        elif key == "zero" and value not in ("1", "2", "3"):
            yield Problem("P03", f"blocks={text}: zero={value} is none of 1, 2, 3", where, "zero=1, 2 or 3")
        elif key == "tp" and value != "1":
            what = f"blocks={text}: tp={value}: blocks of a range are dealt over all of tp, or not at all"
            yield Problem("P03", what, where, "tp=1, or leave tp out of the range")
        elif key == "recompute" and value not in ("none", "selective", "full"):
            what = f"blocks={text}: recompute={value} is none of none, selective, full"
            yield Problem("P04", what, where, "recompute=none, selective or full")
        elif key == "offload":
            yield from value_problems(key, value, where)
