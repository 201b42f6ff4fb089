"""Dropout whose mask depends on seed, sample and element, never on rank, layout or call order.

The mask is a counter-based hash (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): element
`e` of sample `s` at site `name` is a pure function of (seed, s, name, e). A rank that holds a slice of the
positions or heads evaluates the function on its slice; recomputation evaluates it again.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.models.documents import Documents
from unisono.spec.layout import Places

_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Noise:
    """Where this micro-batch's randomness comes from, and what else a block is told of it.

    seed: of the run; None where nothing is dropped, as in evaluation. samples: int64 [B], the global position of each
    sample in the run's order, which is unique over steps and so carries the step too. weight: what one target's loss
    counts for, 0 where nothing is learnt.
    micro: its number among those of this rank in this step. documents: those of its windows, where attention stays
    inside each; None where a window is one.
    """

    seed: int | None
    samples: Tensor
    weight: float = 0.0
    micro: int = 0
    documents: Documents | None = None


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


def numbers(places: Places, device: torch.device) -> Tensor:
    """The places themselves, int64 [size]."""
    return torch.cat([torch.arange(first, first + size, device=device) for first, size in places.stretches])


class Dropout(nn.Module):
    """Drops elements of x [B, ...] with probability p, scaling the rest by 1 / (1 - p).

    `places` says of dims of x which places of them lie here, where that is not all of them.
    """

    def __init__(self, p: float, site: int = 0) -> None:
        super().__init__()
        self.p, self.site = p, site
        self.places: dict[int, Places] = {}

    def forward(self, x: Tensor, noise: Noise | None) -> Tensor:
        if noise is None or not self.drops(noise):
            return x
        return x * self.mask(x.shape, noise, x.dtype) * (1.0 / (1.0 - self.p))

    def drops(self, noise: Noise | None) -> bool:
        """Whether anything is dropped."""
        return noise is not None and noise.seed is not None and self.p > 0.0

    def at(self, places: Mapping[int, Places]) -> "Dropout":
        """The same one, where these dims hold other places than `self.places` says."""
        other = Dropout(self.p, self.site)
        other.places = {**self.places, **places}
        return other

    def mask(self, shape: torch.Size, noise: Noise, dtype: torch.dtype) -> Tensor:
        """One where an element stays, else zero, of the given local shape [B, ...]."""
        return (self.bits(shape, noise) >= int(self.p * 2**32)).to(dtype)

    def bits(self, shape: torch.Size, noise: Noise) -> Tensor:
        """Uniform integers in [0, 2^32), int64 of the given local shape [B, ...]."""
        samples_B = noise.samples
        ones = (1,) * (len(shape) - 1)
        key_B = _mix(_mix((samples_B >> 32) ^ (noise.seed or 0) & _LOW) ^ (samples_B & _LOW) ^ self.site)
        second_B = _mix(key_B ^ 0x9E3779B9)
        row = key_B.view(-1, *(1,) * (len(shape) - 2)) if len(shape) > 2 else key_B
        index = torch.zeros((), dtype=torch.int64, device=samples_B.device)
        for dim in range(1, len(shape) - 1):
            held = self.places.get(dim) or Places.whole(shape[dim])
            coordinate, full = numbers(held, samples_B.device), held.full
            index = index * full + coordinate.view(-1, *(1,) * (len(shape) - 2 - dim))
        row = _mix((row + index) & _LOW) ^ (index >> 32)
        column = numbers(self.places.get(len(shape) - 1) or Places.whole(shape[-1]), samples_B.device)
        # A mask first: torch.compile multiplies bare places in 32 bits on a GPU, for which the factor is too large.
        scattered = (column & _LOW) * 0x9E3779B1
        return _mix(((row.unsqueeze(-1) + scattered) & _LOW) ^ second_B.view(-1, *ones))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def name_sites(model: nn.Module) -> None:
    """Give every Dropout the site of its logical name; call once, before any cutting."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.site = site_of(name)
