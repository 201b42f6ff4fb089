"""Weights that others wrote, as weights of ours: which box of one tensor is which box of another.

A *layout* says of each tensor of ours of which parts it is made. Both ways follow from it: reading a box of ours takes
the boxes of theirs that it meets, and writing one of theirs takes those of ours. So nobody holds a whole model.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from unisono.models.hf.names import Layout, NamedPart, Shape
from unisono.spec.errors import UsageError

_DIMS = 64  # of a tensor, as torch has it
# Buffers that older versions of other libraries wrote beside the weights, and that are computed.
_COMPUTED = ("*rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias", "*.position_ids")


class Weights(ABC):
    """Named tensors on a disk. where: for messages. shapes: of all of them."""

    where: str
    shapes: Mapping[str, Shape]

    @abstractmethod
    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """A part of one of them; on the CPU, in the dtype in which it is stored, to be read at once."""

    def whole(self, name: str) -> Tensor:
        """All of one of them, as `box` gives it."""
        shape = self.shapes[name]
        return self.box(name, (0,) * len(shape), shape)


def shape_of(items: Any) -> Shape:
    """The shape that somebody wrote, as a list of sizes. Raises ValueError for what is none: of long numbers, or of
    many, the product alone takes for ever."""
    if not isinstance(items, list | tuple) or len(items) > _DIMS:
        raise ValueError("a tensor has no shape")
    return tuple(map(size_of, items))


def size_of(number: Any) -> int:
    """The number itself. Raises ValueError for one that counts nothing: torch's have 63 bits."""
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError("a size is no whole number")
    return number


def same(shape: Shape, theirs: str, turned: bool = False) -> NamedPart:
    """All of a tensor, which is all of one of theirs."""
    zeros = (0,) * len(shape)
    return NamedPart(theirs, zeros, shape, zeros, turned)


def own_names(shapes: Mapping[str, Shape], strip: str = "") -> Layout:
    """The layout in which tensors keep their names, without the `strip` with which each begins."""
    return {name: (same(shape, name.removeprefix(strip)),) for name, shape in shapes.items()}


def shapes_there(layout: Layout) -> dict[str, Shape]:
    """Return the shape of each tensor of theirs that a layout makes up, in our order."""
    shapes: dict[str, Shape] = {}
    for parts in layout.values():
        for part in parts:
            end = tuple(a + n for a, n in zip(part.at, part.their_size, strict=True))
            old = shapes.get(part.name, ())
            shapes[part.name] = tuple(max(a, b) for a, b in zip_longest(end, old, fillvalue=0))
    return shapes


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Of whole tensors, none of which is made for it where they say their `shapes` themselves."""
    said: Mapping[str, Shape] | None = getattr(state, "shapes", None)
    return dict(said) if said is not None else {name: tuple(state[name].shape) for name in state}


def dtype_of(state: Mapping[str, Tensor]) -> torch.dtype:
    """Of whole tensors, none of which is made for it where they say their `dtype` themselves."""
    return getattr(state, "dtype", None) or next(iter(state.values())).dtype


def sources_of(layout: Layout) -> dict[str, list[tuple[str, NamedPart]]]:
    """Return, for each name in the file, the tensors of ours that are made from it, each with the part that is used."""
    sources: dict[str, list[tuple[str, NamedPart]]] = defaultdict(list)
    for ours, parts in layout.items():
        for part in parts:
            sources[part.name].append((ours, part))
    return sources


def theirs_of(
    made_of: Sequence[tuple[str, NamedPart]], shape: Shape, ours: Callable[[str], Tensor]
) -> Tensor:
    """A whole tensor of theirs, put together from those of ours, of which two at most are held at once."""
    first, part = made_of[0]
    whole = ours(first)
    if len(made_of) == 1 and part.their_size == shape and part.size == tuple(whole.shape):
        view = whole.reshape(part.size[len(part.size) - len(shape) :])
        return (view.T if part.turned else view).contiguous()
    out = torch.empty(shape, dtype=whole.dtype)
    for name, part in made_of:
        whole, first = whole if name == first else ours(name), name
        part.into_theirs(out, whole)
    return out


@torch.no_grad()
def read_box(parts: Sequence[NamedPart], weights: Weights, start: Shape, out: Tensor) -> None:
    """Fill `out`, a box of a tensor of ours that begins at `start`, from theirs; dtypes may differ."""
    for part in parts:
        if (met := part.within(start, tuple(out.shape))) is None:
            continue
        there = weights.box(met.name, met.at, met.their_size)
        there = (there.T if met.turned else there)[(None,) * (len(met.size) - len(met.at))]
        target = out
        for dim, (first, origin, size) in enumerate(zip(met.start, start, met.size, strict=True)):
            target = target.narrow(dim, first - origin, size)
        target.copy_(there)


def matched(layouts: Sequence[Layout], weights: Weights, extra: Sequence[str] = ()) -> Layout:
    """The layout in which these weights are written, with their own names in it, whatever they all begin with.

    extra: names of theirs that may be there without being used, such as a tied weight's second name.
    Raises UsageError: W02 for tensors that are missing, W03 for unexpected ones, W04 for other shapes.
    """
    tried = [(layout, prefix) for layout in layouts for prefix in _prefixes(layout, weights)]
    if not tried:
        what = "no tensor of it has a name that this model knows"
        raise _misfit(weights, what, list(weights.shapes), code="W02")
    layout, prefix = min(tried, key=lambda pair: len(_missing(*pair, weights)))
    if missing := _missing(layout, prefix, weights):
        what = f"it lacks {len(missing)} of {len(shapes_there(layout))} tensors"
        raise _misfit(weights, what, missing, code="W02")
    wanted = {prefix + name: shape for name, shape in shapes_there(layout).items()}
    known = {prefix + name for name in extra}
    odd = [
        name
        for name in weights.shapes
        if name.startswith(prefix)
        and name not in wanted
        and name not in known
        and not any(fnmatchcase(name, glob) for glob in _COMPUTED)
    ]
    if odd:
        raise _misfit(weights, f"it has {len(odd)} tensors that this model has not", odd, code="W03")
    wrong = [
        f"{name} is {list(weights.shapes[name])} there and {list(shape)} here"
        for name, shape in wanted.items()
        if weights.shapes[name] != shape
    ]
    if wrong:
        raise _misfit(weights, f"{len(wrong)} of its tensors have other shapes", wrong, code="W04")
    return {
        ours: tuple(replace(part, name=prefix + part.name) for part in parts)
        for ours, parts in layout.items()
    }


def _prefixes(layout: Layout, weights: Weights) -> Iterator[str]:
    """What their names may begin with, by one of the longest of the layout's."""
    names = sorted(shapes_there(layout), key=len)
    prefixes = {
        theirs.removesuffix(name)
        for name in (names[-1], names[0], names[len(names) // 2])
        for theirs in weights.shapes
        if theirs.endswith(name)
    }
    yield from sorted(prefix for prefix in prefixes if not prefix or prefix.endswith((".", "/")))


def _missing(layout: Layout, prefix: str, weights: Weights) -> list[str]:
    return [prefix + name for name in shapes_there(layout) if prefix + name not in weights.shapes]


def _misfit(weights: Weights, what: str, names: Sequence[str], *, code: str) -> UsageError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return UsageError(
        f"these weights do not fit the model: {what}: {', '.join(names[:3])}{more}",
        where=weights.where,
        likely="they are of another model, or of other sizes than [model] says",
        fix="the sizes with which they were written, or other weights",
        code=code,
    )
