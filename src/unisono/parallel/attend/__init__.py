"""How ranks of `cp` attend to each other's positions: ways, one a folder, chosen by `cp_kind`.

`ContextWay` is the declaration: which positions lie on which rank, and what must be divisible, without torch. `bind`
makes the module that stands where the model has its own attention between the projections.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from unisono.spec.errors import Problem
from unisono.spec.family import Family, Member
from unisono.spec.fidelity import Fidelity
from unisono.spec.layout import Places

if TYPE_CHECKING:
    from torch import nn

    from unisono.comm.group import Group
    from unisono.spec.model import DealtSize


class ContextWay(Member, ABC):
    """A way's declaration.

    fidelity: of attention, towards that of one device. balanced: each rank holds two chunks of positions of which one
    lies as far from the beginning as the other from the end, so that all have as many earlier positions to attend to;
    else one chunk. by_heads: for attention each rank has some heads, and all positions.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDING
    balanced: ClassVar[bool] = True
    by_heads: ClassVar[bool] = False

    def places(self, positions: int, index: int, ranks: int) -> Places:
        """The positions that lie on one of `ranks` ranks: chunks `index` and `2 ranks - 1 - index` if balanced."""
        if not self.balanced or ranks == 1:
            return Places.whole(positions).dealt(index, ranks)
        size = positions // (2 * ranks)
        mirrored = 2 * ranks - 1 - index
        return Places(positions, ((index * size, size), (mirrored * size, size)))

    def problems(self, cp: int, tp: int, sizes: "Sequence[DealtSize]") -> Iterator[Problem]:
        """What cannot be dealt, each with its remedy. sizes: what a model says that cp deals: its positions, its kinds
        of heads."""
        positions, *heads = sizes
        chunks = 2 * cp if self.balanced else cp
        if positions.size % chunks:
            what = (
                f"cp={cp} does not divide {positions.what} {positions.size}: it is split in {chunks} chunks"
            )
            below, above = positions.size // chunks * chunks, (positions.size // chunks + 1) * chunks
            near = " or ".join(str(n) for n in (below, above) if n)
            yield Problem("P12", what, f"plan.cp, {positions.key}", f"{positions.key} {near}, or another cp")
        elif positions.size // cp < tp:
            what = f"{positions.what} {positions.size} leaves {positions.size // cp} positions for each of cp={cp}"
            fix = f"a lower cp or tp, or {positions.key} of at least {cp * tp}"
            yield Problem(
                "P12", f"{what}, and tp={tp} splits them", f"plan.cp, plan.tp, {positions.key}", fix
            )
        for what, key, size in heads if self.by_heads else ():
            if size % (cp * tp):
                fits = " ".join(str(n) for n in range(1, size + 1) if size % (n * tp) == 0)
                said = f"cp_kind={self.name} splits {what} {size}, which cp x tp = {cp * tp} does not divide"
                fix = f"cp one of {fits}, or cp_kind=ring" if fits else "cp_kind=ring"
                yield Problem("P12", said, f"plan.cp, plan.tp, {key}", fix)

    @abstractmethod
    def bind(self, core: "nn.Module", group: "Group", positions: int) -> "nn.Module":
        """The module that stands in the place of `core`, which attends on one device: queries [B, H, t, K], keys and
        values [B, G, t, K] of this rank's positions, noise → [B, H, t, K]. Where its mask needs to know heads or
        positions, `core.drop.places` says so. Every rank of the group calls it at once, or it hangs."""


CONTEXT_WAYS: Family[ContextWay] = Family(
    "way of attention", "unisono.parallel.attend", ContextWay, "plan.cp_kind", ("P04", "P05"), folders=True
)


def tiles(mine: Places, theirs: Places) -> list[tuple[slice, slice, bool]]:
    """Causal attention of the queries at `mine` to the keys at `theirs` as (queries, keys, whether each sees only keys
    up to itself): rectangles that touch no later key and leave out no earlier one.

    Stretches of both are equal or apart, and ascend.
    """
    if mine == theirs and all(a[0] + a[1] <= b[0] for a, b in pairwise(mine.stretches)):
        here = slice(0, mine.size)
        return [(here, here, True)]
    tiles_here: list[tuple[slice, slice, bool]] = []
    at = 0
    for first, size in mine.stretches:
        earlier = there = 0
        for key, length in theirs.stretches:
            earlier += length if key < first else 0
            if key == first:
                tiles_here.append((slice(at, at + size), slice(there, there + length), True))
            there += length
        if earlier and tiles_here and not tiles_here[-1][2] and tiles_here[-1][1] == slice(0, earlier):
            tiles_here[-1] = slice(tiles_here[-1][0].start, at + size), tiles_here[-1][1], False
        elif earlier:
            tiles_here.append((slice(at, at + size), slice(0, earlier), False))
        at += size
    return tiles_here
