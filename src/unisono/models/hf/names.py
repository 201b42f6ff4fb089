"""Our names of a foreign model's weights, and the library's own: as its modules have them, and as its files do.

A weight of ours is a box of one of theirs (the queries' part of a fused projection), or is put together from boxes of
several (experts that lie one by one in files). `Names` says which; the functions below carry tensors both ways. Nothing
here imports torch or transformers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
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

    def layout(self, files: bool) -> Layout:
        """As files have it, or as modules do."""
        return self.files if files else self.modules

    def of_box(self, ours: str, start: Shape, size: Shape, files: bool = True) -> Iterator[NamedPart]:
        """The parts that a box of our tensor is made of, as when one rank reads what it holds."""
        for part in self.layout(files)[self.ties.get(ours, ours)]:
            box = part.within(start, size)
            if box is not None:
                yield box

    def their_shapes(self, files: bool = True) -> dict[str, Shape]:
        """Their names → shapes, in our order."""
        shapes: dict[str, Shape] = {}
        for parts in self.layout(files).values():
            for part in parts:
                end = tuple(a + n for a, n in zip(part.at, part.their_size, strict=True))
                old = shapes.get(part.name, ())
                shapes[part.name] = tuple(max(a, b) for a, b in zip_longest(end, old, fillvalue=0))
        return shapes

    def ours_of(self, theirs: str, files: bool = True) -> dict[str, tuple[NamedPart, ...]]:
        """Our names that hold something of their tensor, with the parts that lie in it; {} of an unknown name."""
        layout, theirs = self.layout(files), self.their_ties.get(theirs, theirs)
        layout_there = {ours: tuple(p for p in parts if p.name == theirs) for ours, parts in layout.items()}
        return {ours: parts for ours, parts in layout_there.items() if parts}


def to_ours(names: Names, theirs: Callable[[str], "Tensor"], files: bool = False) -> dict[str, "Tensor"]:
    """Our whole tensors, of their whole tensors by name (`state.__getitem__`)."""
    return {ours: one_of(names, ours, theirs, files) for ours in names.shapes}


def one_of(names: Names, ours: str, theirs: Callable[[str], "Tensor"], files: bool = False) -> "Tensor":
    """One whole tensor of ours: a view where one tensor of theirs holds it."""
    owner = names.ties.get(ours, ours)
    parts, shape = names.layout(files)[owner], names.shapes[owner]
    first = parts[0].of_theirs(theirs(parts[0].name))
    if first.shape == shape:
        return first
    whole = first.new_empty(shape)
    for part in parts:
        _narrowed(whole, part.start, part.size).copy_(part.of_theirs(theirs(part.name)))
    return whole


def to_theirs(
    names: Names, ours: Mapping[str, "Tensor"], files: bool = True, aliases: bool = False
) -> dict[str, "Tensor"]:
    """Their whole tensors, of our whole tensors. aliases: tied weights under both names, as `state_dict` has them.
    Raises ValueError where what we have does not fill a tensor of theirs."""
    tensors: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    shapes = names.their_shapes(files)
    for name, parts in names.layout(files).items():
        for part in parts:
            if part.name not in tensors:
                tensors[part.name] = ours[name].new_empty(shapes[part.name])
            part.into_theirs(tensors[part.name], ours[name])
            filled[part.name] = filled.get(part.name, 0) + prod(part.size)
    lacking = [name for name, tensor in tensors.items() if filled[name] != tensor.numel()]
    if lacking:
        raise ValueError(f"nothing fills all of {', '.join(lacking)}")
    if aliases:
        tensors |= {alias: tensors[owner] for alias, owner in names.their_ties.items()}
    return tensors
