"""The gradient norm of the whole model, whatever axes it is spread over, and clipping by it.

Each parameter's squared norm is one number in a vector ordered as the model orders its parameters; ranks add their
parts into it, and everybody sums the vector in that order. So a model cut into stages has, to the last bit, the norm
that it has on one device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.group import Group
from unisono.parallel.params import Slot


@torch.no_grad()
def measure(slots: Sequence[Slot], places: dict[str, int], extra: Tensor, replica: Group) -> list[float]:
    """The 2-norm of the whole model's gradient, then `extra` [n] summed over the replica.

    places: logical name → place, over the whole model. extra: this rank's share of other numbers to sum, which
    travel along; zero where another rank has them.
    """
    held = [s for s in slots if s.counted and s.master.grad is not None and s.master.grad.numel()]
    line = torch.zeros(len(places) + len(extra), dtype=torch.float64, device=extra.device)
    if held:
        norms = torch.stack(torch._foreach_norm([s.master.grad for s in held])).double()  # type: ignore[misc]
        line[[places[s.name] for s in held]] = norms * norms
    line[len(places) :] = extra
    replica.all_reduce(line)
    norm = line[: len(places)].sum().sqrt()
    return [norm.item(), *line[len(places) :].tolist()]


@torch.no_grad()
def clip(slots: Sequence[Slot], norm: float, limit: float) -> None:
    """Scale all gradients so that the norm of the whole is at most `limit`; 0: off (Pascanu et al., 2013)."""
    if not limit or norm <= limit:
        return
    grads = [s.master.grad for s in slots if s.master.grad is not None]
    torch._foreach_mul_(grads, limit / (norm + 1e-6))
