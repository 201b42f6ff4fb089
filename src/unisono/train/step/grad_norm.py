"""The gradient norm of the whole model, whatever axes it is spread over, and clipping by it.

Each parameter's squared norm is one number in a vector ordered as the model orders its parameters; ranks add their
parts into it, and everybody sums the vector without rounding on the way. So a model cut into stages has, to the last
bit, the norm that it has on one device.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unisono.comm.device import is_apart
from unisono.comm.group import Group
from unisono.comm.tree import fold_
from unisono.parallel.params import Slot, values_of
from unisono.parallel.parts import ends_of

_CACHED = 1 << 17  # elements: 512 KiB of float32, half of the second cache of most CPUs

Measure = Callable[[Sequence[Slot], Tensor], list[float]]
"""(slots, extra [n]) → the 2-norm of the whole model's gradient, then `extra` summed over the replica."""


class ByTensor:
    """One number a parameter. shapes: logical name → full shape, over the whole model, in its own order. at: this
    rank's coordinates, which say whether a box that several ranks hold counts here.

    `extra` is this rank's share of other numbers to sum, which travel along; zero where another rank has them.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], replica: Group, at: Mapping[str, int]) -> None:
        self.replica, self.rank_at = replica, at
        self.at = {name: i for i, name in enumerate(shapes)}
        self.length = len(shapes)
        self._known: tuple[Sequence[Slot], Tensor, bool] = ((), torch.empty(0, dtype=torch.int64), False)

    @torch.no_grad()
    def __call__(self, slots: Sequence[Slot], extra: Tensor) -> list[float]:
        return self.read(self.replica.all_reduce(self.line(slots, extra)))

    @torch.no_grad()
    def line(self, slots: Sequence[Slot], extra: Tensor) -> Tensor:
        """This rank's part of what is summed over the replica."""
        grads = [(s, values_of(grad)) for s in slots if (grad := s.master.grad) is not None]
        return torch.cat((self.squares(grads, extra.device), extra))

    def squares(self, parts: Iterable[tuple[Slot, Tensor]], device: torch.device) -> Tensor:
        """[length], float64: squared norms of what this rank holds of each parameter, or of a tensor that is cut as it
        is, such as its gradient; zeros for the rest."""
        held = [(slot, x) for slot, x in parts if x.numel() and slot.counted(self.rank_at)]
        empty = torch.zeros(self.length, dtype=torch.float64, device=device)
        return self._squares([slot for slot, _ in held], [x for _, x in held], empty) if held else empty

    def by_parameter(self, line: Tensor) -> list[float]:
        """The sums of `squares` over all ranks, line [length], as the 2-norm of each parameter in the model's order."""
        return [math.sqrt(number) for number in line.tolist()]

    def read(self, line: Tensor) -> list[float]:
        """The line as numbers: all at once, since a GPU is waited for, and on a CPU an operation on a few numbers
        costs more than Python's own sum."""
        numbers = line.tolist()
        return [math.sqrt(_sum(numbers[: self.length])), *numbers[self.length :]]

    def _squares(self, held: Sequence[Slot], tensors: Sequence[Tensor], empty: Tensor) -> Tensor:
        """`squares` of one tensor for each slot. empty: zeros, which may be filled."""
        norms = torch.stack(torch._foreach_norm(list(tensors))).double()
        places, whole = self._places(held, empty.device)
        norms.square_()
        if whole:
            return norms
        empty[places] = norms
        return empty

    def _places(self, held: Sequence[Slot], device: torch.device) -> tuple[Tensor, bool]:
        """The places of the numbers of `held` (int64), and whether these are all places in order. The same in nearly
        every step, so it is not made again."""
        known, places, whole = self._known
        if len(known) != len(held) or any(a is not b for a, b in zip(known, held, strict=True)):
            at = [self.at[s.name] for s in held]
            places, whole = torch.tensor(at, device=device), at == list(range(self.length))
            self._known = (held, places, whole)
        return places, whole


def _sum(numbers: Sequence[float]) -> float:
    """Rounded once, so in any order the same; infinite where it is too large for a float."""
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.inf


class ByRow(ByTensor):
    """One number for each row (dim 0) of each parameter, so that cutting rows over ranks changes no bit of the norm.

    blocks: as many numbers for each row, of columns that follow each other; so does cutting a matrix between them.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], replica: Group, at: Mapping[str, int], blocks: int = 1
    ) -> None:
        super().__init__(shapes, replica, at)
        self.length, self.blocks = 0, blocks
        for name, shape in shapes.items():
            self.at[name] = self.length
            self.length += (shape[0] if shape else 1) * blocks

    def read(self, line: Tensor) -> list[float]:
        norm = line[: self.length].sum().sqrt()
        return torch.cat((norm.view(1), line[self.length :])).tolist()

    def by_parameter(self, line: Tensor) -> list[float]:
        ends = [*list(self.at.values())[1:], self.length]
        parts = [line[start:end].sum() for start, end in zip(self.at.values(), ends, strict=True)]
        return torch.stack(parts).sqrt().tolist()

    def _squares(self, held: Sequence[Slot], tensors: Sequence[Tensor], empty: Tensor) -> Tensor:
        for slot, x in zip(held, tensors, strict=True):
            rows = x.reshape(x.shape[0] if x.dim() else 1, -1)
            first = self.at[slot.name] + (slot.start[0] if slot.start else 0) * self.blocks
            numbers = empty[first : first + len(rows) * self.blocks].view(len(rows), self.blocks)
            for block, columns in self._columns(slot, rows.shape[1]):
                numbers[:, block] += _squares(rows[:, columns])
        return empty

    def _columns(self, slot: Slot, width: int) -> Iterator[tuple[int, slice]]:
        """(block, its columns among the `width` of this rank's part); blocks that lie elsewhere are left out."""
        if self.blocks == 1 or len(slot.shape) != 2:
            yield 0, slice(None)
            return
        here = range(slot.start[1], slot.start[1] + width)
        for block, (start, end) in enumerate(pairwise(ends_of(slot.shape[1], self.blocks))):
            if end > start and start in here:
                yield block, slice(start - here.start, end - here.start)


def _squares(rows: Tensor) -> Tensor:
    """rows [n, width] → [n], the squared norm of each; on a CPU a few rows at a time, which stay in its cache."""
    few = len(rows) if is_apart(rows) else max(1, _CACHED // max(1, rows.shape[1]))
    return torch.cat([fold_(part * part) for part in rows.split(few)])


@torch.no_grad()
def clip(slots: Sequence[Slot], norm: float, limit: float) -> None:
    """Scale all gradients so that the norm of the whole is at most `limit`; 0: off (Pascanu et al., 2013)."""
    grads = [values_of(s.master.grad) for s in slots if s.master.grad is not None]
    if not limit or norm <= limit or not grads:
        return
    if is_apart(grads[0]):
        torch._foreach_div_(grads, excess(norm, limit))
    else:  # a number would be made into a tensor, and converted, once for each gradient
        torch._foreach_div_(grads, torch.tensor(excess(norm, limit), dtype=grads[0].dtype))


def excess(norm: float, limit: float) -> float:
    """What gradients of this norm are divided by, so that it is at most `limit`."""
    return (norm + 1e-6) / limit
