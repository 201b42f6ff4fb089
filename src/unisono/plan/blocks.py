"""What a plan does with each block of the model: `recompute`, `offload`, and ranges of blocks that differ.

    recompute=auto:full=2,selective=1         of the blocks of each stage: the first two wholly, the third in parts
    offload=params+activations:to=disk        what lies elsewhere while nobody computes with it
    blocks=0-5:recompute=full,zero=2;6-11:offload=params

A range names blocks by their numbers in the whole model, the last one included, so that stages may cut through it. What
a range leaves out is as the plan's own keys say, and so are stem, head and all blocks that no range names.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from unisono.plan.fields import ALIKE, PlanFields
from unisono.plan.grammar import choice, value_problems
from unisono.spec.errors import Problem, UsageError
from unisono.spec.words import meant

_SAYS = ("recompute", "offload", "zero", "tp")
_EXAMPLE = "blocks=0-5:recompute=full,zero=2;6-11:offload=params"
_NUMBERS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclass(frozen=True, slots=True)
class Again:
    """Blocks of each stage that are computed again in backward: so many of its first ones wholly, so many after them in
    what the model's anatomy names."""

    full: int = 0
    selective: int = 0


@dataclass(frozen=True, slots=True)
class Away:
    """What lies elsewhere while nobody computes with it. on_disk: in a file, rather than in the host's memory."""

    optimizer: bool = False
    params: bool = False
    activations: bool = False
    on_disk: bool = False

    def __bool__(self) -> bool:
        return self.optimizer or self.params or self.activations


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


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """How one block is played. recompute: none, selective or full. away: what of it lies elsewhere. zero: what `shard`
    deals. whole: each rank of `tp` has all of its weights, and computes with the positions that lie on it."""

    recompute: str
    away: Away
    zero: int
    whole: bool = False


@lru_cache(maxsize=1024)
def options_of(plan: PlanFields, stages: Sequence[range]) -> tuple[BlockOptions, ...]:
    """How every block of the model is played, whose stages have these. Ranges have the last word; `recompute=auto` says
    it of the first blocks of each stage. Raises UsageError P25 for a range of blocks that there are not."""
    blocks: list[BlockOptions] = []
    away, count = away_of(plan), sum(map(len, stages))
    counts = (str(value).count("/") + 1 for value in choice(plan.recompute).options.values())
    for named in {number for number in counts if number > 1} - {len(stages)}:
        what = f"recompute={plan.recompute} says {named} stages, and the model is cut into {len(stages)}"
        fix = "recompute=auto, or a number for each stage"
        raise UsageError(what, where="plan.recompute", fix=fix, code="P25")
    for at, stage in enumerate(stages):
        again = again_of(plan, len(stage), at)
        modes = ["full"] * again.full + ["selective"] * again.selective
        modes += ["none"] * (len(stage) - len(modes))
        blocks += [BlockOptions(mode, away, plan.zero) for mode in modes]
    for part in ranges_of(plan.blocks):
        if part.last >= count:
            what = f"blocks={plan.blocks} names block {part.last}, and the model has {count}, from 0 on"
            raise UsageError(what, where="plan.blocks", fix=f"numbers up to {count - 1}", code="P25")
        for number in range(part.first, part.last + 1):
            usual, offload = blocks[number], part.says("offload")
            blocks[number] = BlockOptions(
                part.says("recompute") or usual.recompute,
                usual.away if offload is None else away_in(offload),
                int(part.says("zero") or usual.zero),
                part.says("tp") is not None and plan.tp > 1,
            )
    return tuple(blocks)


def on_disk(plan: PlanFields, blocks: Sequence[BlockOptions]) -> bool:
    """Whether anything lies in a file."""
    return any(away.on_disk for away in (away_of(plan), *(block.away for block in blocks)))


def again_of(plan: PlanFields, blocks: int, stage: int = 0) -> Again:
    """What a stage with so many blocks computes again. `auto` that nobody has chosen for is none."""
    mode = choice(plan.recompute)

    def count(option: str) -> int:
        counts = str(mode.options.get(option, 0)).split("/")
        return int(counts[stage] if len(counts) > 1 else counts[0])

    full = blocks if mode.name == "full" else min(blocks, count("full"))
    selective = blocks if mode.name == "selective" else count("selective")
    return Again(full, min(selective, blocks - full))


def away_of(plan: PlanFields) -> Away:
    """What of stem and head lies elsewhere, and of blocks of which no range says another."""
    return away_in(plan.offload)


def away_in(text: str) -> Away:
    """What a value of `offload` puts elsewhere. `params` takes the optimiser with it: its numbers are read where the
    weights are, and are twice as many."""
    value = choice(text)
    words = {value.name, *value.marks}
    disk = value.options.get("to") == "disk"
    return Away(bool(words & {"optimizer", "params"}), "params" in words, "activations" in words, disk)


def offload_text(away: Away) -> str:
    """The value of `offload` that says it."""
    if not away:
        return "none"
    first = "params" if away.params else "optimizer" if away.optimizer else "activations"
    more = "+activations" if away.activations and first != "activations" else ""
    return f"{first}{':to=disk' if away.on_disk else ''}{more}"


@cache
def ranges_of(text: str) -> tuple[Range, ...]:
    """The ranges of a value of `blocks` without problems."""
    return () if text == ALIKE else tuple(part for word in text.split(";") if (part := _range(word)))


def text_of(ranges: Iterator[Range] | tuple[Range, ...]) -> str:
    """The value that says these ranges; one of blocks that nothing is said of is left out."""
    return ";".join(str(part) for part in ranges if part.said) or ALIKE


def text_problems(text: object, where: str) -> Iterator[Problem]:
    """Everything that is wrong with a value of `blocks`, whatever the model has."""
    if not isinstance(text, str) or not text or any(c.isspace() for c in text):
        yield Problem("P03", f"blocks={text!r} is not a word", where, f"for example {_EXAMPLE}")
        return
    if text == ALIKE:
        return
    before = -1
    for word in text.split(";"):
        part = _range(word)
        if part is None:
            what = f"blocks={text}: {word!r} is not of the form FIRST-LAST:key=value"
            yield Problem("P05", what, where, f"for example {_EXAMPLE}, or blocks={ALIKE}")
            continue
        if part.last < part.first:
            what = f"blocks={text}: {part.first}-{part.last} ends before it begins"
            yield Problem("P05", what, where, f"{part.last}-{part.first}")
        elif part.first <= before:
            what = f"blocks={text}: {word} begins at {part.first}, and the range before it ends at {before}"
            yield Problem("P05", what, where, "ranges that ascend, no block in two of them")
        before = max(before, part.first, part.last)
        yield from _range_problems(text, part, where)


def _range(word: str) -> Range | None:
    numbers, colon, rest = word.partition(":")
    match = _NUMBERS.fullmatch(numbers)
    pairs = [pair.partition("=") for pair in rest.split(",")]
    if match is None or not colon or not all(key and equals and value for key, equals, value in pairs):
        return None
    first = int(match[1])
    return Range(first, int(match[2] or first), tuple((key, value) for key, _, value in pairs))


def _range_problems(text: str, part: Range, where: str) -> Iterator[Problem]:
    keys = [key for key, _ in part.said]
    for key, value in part.said:
        if key not in _SAYS:
            what = f"blocks={text}: a range says nothing of {key}{meant(key, _SAYS)}"
            yield Problem("P05", what, where, f"keys of a range: {' '.join(_SAYS)}")
        elif keys.count(key) > 1:
            what = f"blocks={text}: {key} is given twice in one range"
            yield Problem("P02", what, where, "keep one of them")
        elif key == "zero" and value not in ("1", "2", "3"):
            yield Problem("P03", f"blocks={text}: zero={value} is none of 1, 2, 3", where, "zero=1, 2 or 3")
        elif key == "tp" and value != "1":
            what = f"blocks={text}: tp={value}: blocks of a range are split over all of tp, or not at all"
            yield Problem("P03", what, where, "tp=1, or leave tp out of the range")
        elif key == "recompute" and value not in ("none", "selective", "full"):
            what = f"blocks={text}: recompute={value} is none of none, selective, full"
            yield Problem("P04", what, where, "recompute=none, selective or full")
        elif key == "offload":
            yield from value_problems(key, value, where)
