"""The gradient norm of the whole model, whatever axes it is spread over, and clipping by it.

Each parameter's squared norm is one number in a vector ordered as the model orders its parameters; ranks add their
parts into it, and everybody sums the vector in that order. So a model cut into stages has, to the last bit, the norm
that it has on one device.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.comm.tree import fold
from unisono.parallel.params import Slot

Measure = Callable[[Sequence[Slot], Tensor], list[float]]
"""(slots, extra [n]) → the 2-norm of the whole model's gradient, then `extra` summed over the replica."""


class ByTensor:
    """One number a parameter. shapes: logical name → full shape, over the whole model, in its own order.

    `extra` is this rank's share of other numbers to sum, which travel along; zero where another rank has them.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], replica: Group) -> None:
        self.replica = replica
        self.at = {name: i for i, name in enumerate(shapes)}
        self.length = len(shapes)
        self._known: tuple[Sequence[Slot], Tensor] = ((), torch.empty(0, dtype=torch.int64))

    @torch.no_grad()
    def __call__(self, slots: Sequence[Slot], extra: Tensor) -> list[float]:
        line = torch.zeros(self.length + len(extra), dtype=torch.float64, device=extra.device)
        self._fill(
            [s for s in slots if s.counted and s.master.grad is not None and s.master.grad.numel()], line
        )
        line[self.length :] = extra
        self.replica.all_reduce(line)
        norm = line[: self.length].sum().sqrt()
        return torch.cat((norm.view(1), line[self.length :])).tolist()  # at once: a GPU is waited for once

    def _places(self, held: Sequence[Slot], device: torch.device) -> Tensor:
        """Where the numbers of `held` stand: int64. The same in nearly every step, so it is not made again."""
        known, places = self._known
        if len(known) != len(held) or any(a is not b for a, b in zip(known, held, strict=True)):
            places = torch.tensor([self.at[s.name] for s in held], device=device)
            self._known = (held, places)
        return places

    def _fill(self, held: Sequence[Slot], line: Tensor) -> None:
        if held:
            norms = torch.stack(torch._foreach_norm([s.master.grad for s in held])).double()  # type: ignore[misc]
            line[self._places(held, line.device)] = norms.square_()


class ByRow(ByTensor):
    """One number for each row (dim 0) of each parameter, so that cutting rows over ranks changes no bit of the norm."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], replica: Group) -> None:
        super().__init__(shapes, replica)
        self.length = 0
        for name, shape in shapes.items():
            self.at[name] = self.length
            self.length += shape[0] if shape else 1

    def _fill(self, held: Sequence[Slot], line: Tensor) -> None:
        for slot in held:
            grad = slot.master.grad
            if grad is not None:
                rows = grad.reshape(grad.shape[0] if grad.dim() else 1, -1)
                first = self.at[slot.name] + (slot.start[0] if slot.start else 0)
                line[first : first + len(rows)] += fold(rows * rows)


@torch.no_grad()
def clip(slots: Sequence[Slot], norm: float, limit: float) -> None:
    """Scale all gradients so that the norm of the whole is at most `limit`; 0: off (Pascanu et al., 2013)."""
    if not limit or norm <= limit:
        return
    grads = [s.master.grad for s in slots if s.master.grad is not None]
    torch._foreach_mul_(grads, limit / (norm + 1e-6))
