"""Words that a model uses about itself, so that parallelism can cut it without knowing it.

A model has three parts, `stem`, `blocks`, `head`. Module names below are globs over logical names such as
`blocks.3.attn.proj`; `*` stands for one component.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Self


class Split(Enum):
    """How `tp` and `cp` cut one module (Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., 2022)."""

    COLUMN = "column"  # output features are dealt; the input is gathered along the sequence, if there is one
    ROW = "row"  # input features are dealt; the output is summed and scattered along the sequence
    VOCAB_IN = "vocab_in"  # an embedding table dealt by rows
    VOCAB_OUT = "vocab_out"  # the classifier dealt by rows; see Anatomy.cross_entropy
    SEQUENCE_DROPOUT = "sequence_dropout"  # a dropout on the residual stream: sees a slice of positions
    HEAD_DROPOUT = (
        "head_dropout"  # a dropout whose dim 1 is dealt: attention weights by heads, maps by channels
    )
    NORM = "norm"  # a group norm behind COLUMN: each rank has some of the groups
    HEADS = "heads"  # attention between COLUMN and ROW: is told how many queries each of its keys has, as `counts`
    POSITIONS = "positions"  # a position table: each rank adds the rows of its slice of positions
    EXPERTS = "experts"  # a stack of feed-forward layers: `ep` deals them, the rest of `tp` cuts their width
    ROUTER = "router"  # sends tokens to experts: whole, sees a slice of positions
    GATHERED = (
        "gathered"  # its input is gathered along the sequence, once for all COLUMN modules inside of it
    )
    SLICED = "sliced"  # whole on every rank of tp, which goes on with its slice of the positions
    ROTARY = "rotary"  # turns queries and keys by their positions: sees all that a rank of `cp` has
    GRAPH = "graph"  # a unit of a traced graph, which says itself what is dealt
    CORE = "core"  # attention of queries to keys and values, without weights: where `cp` reaches other ranks' positions


@dataclass(frozen=True, slots=True)
class Places:
    """Which places of a dim lie on this rank: stretches of them, (first, how many), in the order in which they lie
    here. full: places in all."""

    full: int
    stretches: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, full: int) -> Self:
        """All of them."""
        return cls(full, ((0, full),))

    @property
    def size(self) -> int:
        """How many lie here."""
        return sum(size for _, size in self.stretches)

    def part(self, start: int, size: int) -> Self:
        """`size` of those that lie here, from the one at `start` on."""
        cut, end, at = [], start + size, 0
        for first, length in self.stretches:
            a, b = max(start, at), min(end, at + length)
            if a < b:
                cut.append((first + a - at, b - a))
            at += length
        return type(self)(self.full, tuple(cut))

    def dealt(self, index: int, ranks: int) -> Self:
        """Those of one of `ranks` ranks to which they are dealt in their order; the first `size % ranks` hold one
        more."""
        base, more = divmod(self.size, ranks)
        return self.part(index * base + min(index, more), base + (index < more))


@dataclass(frozen=True, slots=True)
class Units:
    """Features that are dealt in whole units, such as heads: `count` units of `width` features. group: consecutive
    units that read one key and one value (grouped queries, Ainslie et al., 2023), whose features follow those of the
    group, each as wide as a unit; 0: there are none."""

    count: int
    width: int = 1
    group: int = 0

    def before(self, unit: int) -> int:
        """Features of the units before this one, and of keys and values before it."""
        return self.width * (unit + (2 * (unit // self.group) if self.group else 0))


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What may be cut where.

    splits: module glob → Split, for `tp`; empty means that the model declares none and `tp` is refused.
    divides: name → size of what `tp` deals (heads, hidden width).
    units: module glob → what its dealt features consist of; single features where it says nothing.
    ties: (alias parameter, owner parameter): one weight under two names.
    sequence: length of dim 1 of inputs, targets and residual stream, which `cp` deals, and `tp` between blocks; 0 if
    there is none.
    cross_entropy: the loss is the cross-entropy summed over targets and nothing else, so `tp` may take it without
    gathering the logits of VOCAB_OUT. A loss of another kind is given all logits.
    again: globs of modules without weights that keep much and are quickly computed again, as `recompute=selective`
    does; empty means that there are none.
    tables: name of the module whose parameters are tables that are looked up, of which a sample touches few rows; ""
    where there is none. table_cut: how `ep` deals them, "table", "row" or "column".
    uncut: why `tp` cannot deal this model although splits say something; "" if it can.
    terms: places of a sample over which gradients are added up, where `sequence` does not say; 0: one.
    whole: why a plain module could not be cut, for whoever asks it to be; "" where nobody tried.
    drawn: modules that draw random numbers of their own, so that two ranks would draw others than one; "": none.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    divides: Mapping[str, int] = field(default_factory=dict)
    units: Mapping[str, Units] = field(default_factory=dict)
    ties: tuple[tuple[str, str], ...] = ()
    sequence: int = 0
    cross_entropy: bool = False
    again: tuple[str, ...] = ()
    tables: str = ""
    table_cut: str = "table"
    uncut: str = ""
    terms: int = 0
    whole: str = ""
    drawn: str = ""

    def is_again(self, name: str) -> bool:
        """Whether `recompute=selective` computes the module called `name` again."""
        return any(_matches(glob, name) for glob in self.again)

    def split_of(self, name: str) -> Split | None:
        """The split of the module called `name`, or None where it stays whole."""
        return next((split for glob, split in self.splits.items() if _matches(glob, name)), None)

    def units_of(self, name: str, features: int = 0) -> Units:
        """The units of the module called `name`; else each of its `features` is one."""
        matching = (units for glob, units in self.units.items() if _matches(glob, name))
        return next(matching, Units(features))


def _matches(glob: str, name: str) -> bool:
    parts, pattern = name.split("."), glob.split(".")
    return len(pattern) == len(parts) and all(map(fnmatchcase, parts, pattern))
