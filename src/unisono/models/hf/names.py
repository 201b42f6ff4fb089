"""Our names of a foreign model's weights, and the library's own: as its modules have them, and as its files do.

A weight of ours is a box of one of theirs (the queries' part of a fused projection), or is put together from boxes of
several (experts that lie one by one in files). `Names` says which. Nothing here imports torch or transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A box of one of our tensors, which is a box of one of theirs.

    name: theirs. start: where the box begins in ours, `size` its size, in our dims. at: where it begins in theirs, in
    their dims. A tensor of theirs may lack leading dims of ours, in which the box is 1 wide, as one expert of many is.
    turned: theirs is the transpose (then both have two dims).
    """

    name: str
    start: Shape
    size: Shape
    at: Shape
    turned: bool = False

    @property
    def their_size(self) -> Shape:
        """Size of the box in the dims of their tensor."""
        size = self.size[len(self.size) - len(self.at) :]
        return size[::-1] if self.turned else size

    def within(self, start: Shape, size: Shape) -> "NamedPart | None":
        """What of it lies in a box of our tensor, None if nothing does."""
        first = tuple(map(max, self.start, start))
        end = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, start, size, strict=True))
        if any(a >= b for a, b in zip(first, end, strict=True)):
            return None
        moved = [a - b for a, b in zip(first, self.start, strict=True)][len(self.size) - len(self.at) :]
        moved = moved[::-1] if self.turned else moved
        at = tuple(a + b for a, b in zip(self.at, moved, strict=True))
        return replace(self, start=first, size=tuple(b - a for a, b in zip(first, end, strict=True)), at=at)

    def of_theirs(self, theirs: "Tensor") -> "Tensor":
        """The box, in our dims, of their whole tensor: a view."""
        box = _narrowed(theirs, self.at, self.their_size)
        box = box.T if self.turned else box
        return box[(None,) * (len(self.size) - box.dim())]

    def into_theirs(self, theirs: "Tensor", ours: "Tensor") -> None:
        """Copy the box of our whole tensor into their whole tensor."""
        self.of_theirs(theirs).copy_(_narrowed(ours, self.start, self.size))


def _narrowed(x: "Tensor", start: Sequence[int], size: Sequence[int]) -> "Tensor":
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        x = x.narrow(dim, first, length)
    return x


Layout = Mapping[str, tuple[NamedPart, ...]]


@dataclass(frozen=True, slots=True)
class Names:
    """shapes: our name → shape, in our order, aliases left out. modules, files: our name → what it is made of, by the
    names of `model.state_dict()` and by those that `save_pretrained` writes. ties: our alias → our owner, of one weight
    under two names. their_ties: the same by names of modules; files hold the owner alone."""

    shapes: Mapping[str, Shape]
    modules: Layout
    files: Layout
    ties: Mapping[str, str]
    their_ties: Mapping[str, str]
