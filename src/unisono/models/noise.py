"""Dropout whose mask depends on seed, sample and element, never on rank, layout or call order.

The mask is a counter-based hash (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): element
`e` of sample `s` at site `name` is a pure function of (seed, s, name, e). A rank that holds a slice of the
positions or heads evaluates the function on its slice; recomputation evaluates it again.
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Noise:
    """Where this micro-batch's randomness comes from, and what else a block is told of it.

    seed: of the run. samples: int64 [B], the global position of each sample in the run's order, which is
    unique over steps and so carries the step too. weight: what one target's loss counts for, 0 where nothing is learnt.
    micro: its number among those of this rank in this step.
    """

    seed: int
    samples: Tensor
    weight: float = 0.0
    micro: int = 0


def _mix(x: Tensor) -> Tensor:
    """Scramble the low 32 bits of non-negative int64 values; the result is in [0, 2^32)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _LOW  # int64 products wrap, and the low 32 bits survive the wrapping
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


def site_of(name: str) -> int:
    """The 32-bit number of a logical module name."""
    return zlib.crc32(name.encode())


class Dropout(nn.Module):
    """Drops elements of x [B, ...] with probability p, scaling the rest by 1 / (1 - p).

    `window` maps a dim of x to (start, full size) where this rank holds a slice of that dim.
    """

    def __init__(self, p: float, site: int = 0) -> None:
        super().__init__()
        self.p, self.site = p, site
        self.window: dict[int, tuple[int, int]] = {}

    def forward(self, x: Tensor, noise: Noise | None) -> Tensor:
        if noise is None or self.p == 0.0:
            return x
        keep = self.bits(x.shape, noise) >= int(self.p * 2**32)
        return x * keep.to(x.dtype) * (1.0 / (1.0 - self.p))

    def bits(self, shape: torch.Size, noise: Noise) -> Tensor:
        """Uniform integers in [0, 2^32), int64 of the given local shape [B, ...]."""
        samples_B = noise.samples
        ones = (1,) * (len(shape) - 1)
        key_B = _mix(_mix((samples_B >> 32) ^ noise.seed & _LOW) ^ (samples_B & _LOW) ^ self.site)
        second_B = _mix(key_B ^ 0x9E3779B9)
        row = key_B.view(-1, *(1,) * (len(shape) - 2)) if len(shape) > 2 else key_B
        index = torch.zeros((), dtype=torch.int64, device=samples_B.device)
        for dim in range(1, len(shape) - 1):
            coordinate, full = self._coordinate(dim, shape[dim], samples_B.device)
            index = index * full + coordinate.view(-1, *(1,) * (len(shape) - 2 - dim))
        row = _mix((row + index) & _LOW) ^ (index >> 32)
        column, _ = self._coordinate(len(shape) - 1, shape[-1], samples_B.device)
        return _mix((row.unsqueeze(-1) + column * 0x9E3779B1 & _LOW) ^ second_B.view(-1, *ones))

    def _coordinate(self, dim: int, size: int, device: torch.device) -> tuple[Tensor, int]:
        start, full = self.window.get(dim, (0, size))
        return torch.arange(start, start + size, device=device), full

    def extra_repr(self) -> str:
        return f"p={self.p}"


def name_sites(model: nn.Module) -> None:
    """Give every Dropout the site of its logical name; call once, before any cutting."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.site = site_of(name)
