"""Whole tensors out of the boxes that the ranks of a replica hold, and back.

Runs that are cut in different ways can exchange only what no cut changes: whole parameters, by name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.group import Group


@dataclass(frozen=True, slots=True)
class BoxShape:
    """What one rank holds of a tensor. shape: of the whole. start: where this box begins in it. box: its shape."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    box: tuple[int, ...]
    dtype: torch.dtype

    def of(self, whole: Tensor) -> Tensor:
        """The box in a whole tensor, a view."""
        return whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.box, strict=True))]


class Boxes:
    """The boxes of one replica. replica: its ranks. world: all ranks of the run, the first of which has whole tensors
    to hand out. Every rank makes it and calls each of its methods, or it hangs."""

    def __init__(
        self, parts: Mapping[str, BoxShape], replica: Group, world: Group, device: torch.device
    ) -> None:
        self.parts, self._replica, self._world, self._device = dict(parts), replica, world, device
        said = {
            name: [part.shape, part.start, part.box, str(part.dtype).removeprefix("torch.")]
            for name, part in parts.items()
        }
        all_said = _gather_json(said, replica, device)
        # The first rank that holds a box puts it into the whole; others may hold the same one.
        holders: dict[tuple[str, tuple[int, ...]], int] = {}
        self._like: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for rank, table in enumerate(all_said):
            for name, (shape, start, box, dtype) in table.items():
                if 0 not in box:
                    holders.setdefault((name, tuple(start)), rank)
                self._like.setdefault(name, (tuple(shape), getattr(torch, dtype)))
        self._counted = {
            name for name, part in parts.items() if holders.get((name, part.start)) == replica.index
        }

    def gather(self, boxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By name, whole tensors, on every rank of the replica. boxes: of this rank."""
        if self._replica.size == 1:
            return dict(boxes)
        whole: dict[str, Tensor] = {}
        for name in sorted(self._like):
            shape, dtype = self._like[name]
            whole[name] = torch.zeros(shape, dtype=dtype, device=self._device)
            if name in self._counted:
                self.parts[name].of(whole[name]).copy_(boxes[name])
            self._replica.all_reduce(whole[name])
        return whole

    def scatter(self, whole: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """By name, this rank's boxes. whole: on the first rank of the run, with `prefix` before each name."""
        boxes: dict[str, Tensor] = {}
        for name in sorted(self._like):
            shape, dtype = self._like[name]
            if self._world.index == 0:
                x = whole[prefix + name].to(self._device, dtype).contiguous()
            else:
                x = torch.empty(shape, dtype=dtype, device=self._device)
            self._world.broadcast(x)
            if name in self.parts:
                boxes[name] = self.parts[name].of(x).clone()
        return boxes


def _gather_json(said: object, group: Group, device: torch.device) -> list[dict[str, list]]:
    """What each rank of the group says."""
    line = json.dumps(said).encode()
    if group.size == 1:
        return [json.loads(line)]
    lengths = group.all_gather(torch.tensor([len(line)], device=device)).tolist()
    padded = torch.tensor(list(line.ljust(max(lengths))), dtype=torch.uint8, device=device)
    rows = group.all_gather(padded.view(1, -1)).cpu()
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]
