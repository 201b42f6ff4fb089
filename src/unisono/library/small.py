"""Small things that data ranks tell each other outside the gradients: seeds, sums, whether they agree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.group import Group

PACK_BYTES = 16 << 20


class Small:
    """Exchanges of a few numbers over the data ranks; `device` is where the backend wants them."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device

    def sums(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over the ranks."""
        if self.group.size == 1:
            return [float(v) for v in values]
        line = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.group.all_reduce(line).tolist()

    def gather(self, number: int) -> list[int]:
        """Every rank's number, by rank."""
        return [row[0] for row in self.rows([number])]

    def rows(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank; all give as many."""
        line = torch.tensor([list(numbers)], dtype=torch.int64, device=self.device)
        return self.group.all_gather(line).tolist()

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's x, of the same shape and dtype on every rank; on the CPU."""
        return self.group.broadcast(x.to(self.device)).cpu()


@torch.no_grad()
def spread(tensors: Sequence[Tensor], group: Group) -> None:
    """Overwrite the tensors with those of the group's first rank, many in one broadcast."""
    if group.size == 1:
        return
    run: list[Tensor] = []
    for x in (*tensors, None):
        full = sum(r.nbytes for r in run) > PACK_BYTES
        if run and (x is None or full or x.dtype != run[0].dtype or x.device != run[0].device):
            flat = group.broadcast(torch.cat([r.detach().reshape(-1) for r in run]))
            for r, part in zip(run, flat.split([r.numel() for r in run]), strict=True):
                r.detach().copy_(part.view(r.shape))
            run = []
        if x is not None:
            run.append(x)
