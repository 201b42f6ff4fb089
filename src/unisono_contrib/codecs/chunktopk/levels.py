"""Two bits a value: a sign, and one of two levels of its chunk.

Values of a chunk are parted into smaller and larger ones, and the levels are the means of the two, which is what leaves
the least squared error (Lloyd, "Least squares quantization in PCM", 1982). Where they are parted is
sought in four looks: at the mean of all, then three times halfway between the two means so far. That leaves 3 % more
error than the best place does, of normal values and of their cubes. A chunk that sends zeros has zero as its lower
level.
"""

import torch
from torch import Tensor

from unisono_contrib.codecs.chunktopk.gaps import ChunkCut

OCTAVE = 32
"""Ratios of levels in an octave, so that the lower level is off by a hundredth at most."""
ZERO = 255
"""The ratio that stands for a lower level of zero."""
LOOKS = 3
"""Steps of Lloyd's algorithm."""


def two_levels(values: Tensor, cut: ChunkCut) -> tuple[Tensor, Tensor, Tensor]:
    """values [kept] → codes [kept] uint8 (1: the upper level, 2: negative), upper levels [chunks] bf16, ratios of upper
    to lower ones [chunks] uint8, in 32nds of an octave. A chunk with a value that is not finite has no finite level."""
    sizes = values.abs().float()
    has_zeros = _sums((sizes == 0).float(), cut) > 0
    middle = (_sums(sizes, cut) / cut.counts).masked_fill_(has_zeros, 0.0)
    high = sizes > middle[cut.chunk_of]
    lower, upper, most = _means(sizes, high, cut)
    for _ in range(LOOKS):
        middle = ((lower + upper) / 2).masked_fill_(has_zeros, 0.0)
        high = sizes > middle[cut.chunk_of]
        lower, upper, most = _means(sizes, high, cut)
    upper = torch.where(most > 0, upper, lower)
    octaves = (upper / lower).log2_().mul_(OCTAVE).nan_to_num_(0.0).round_().clamp_(0, ZERO - 1)
    ratios = torch.where(lower == 0, float(ZERO), octaves).to(torch.uint8)
    codes = (values < 0).to(torch.uint8).mul_(2).add_(high)
    return codes, upper.bfloat16(), ratios


def from_levels(codes: Tensor, upper: Tensor, ratios: Tensor, cut: ChunkCut) -> Tensor:
    """What `two_levels` made of values, in fp32 [kept]. The same bits on every machine: products of two numbers of
    eight bits are exact."""
    # A power of two computed here and there may differ in its last bit; rounded to a bf16 it does not.
    shares = torch.tensor([2.0 ** (-ratio / OCTAVE) for ratio in range(ZERO)] + [0.0]).bfloat16()
    most = upper.float()
    levels = torch.stack([most * shares.to(upper.device)[ratios.long()].float(), most], dim=1).view(-1)
    sizes = levels[cut.chunk_of * 2 + codes.bitwise_and(1)]
    return torch.where(codes > 1, -sizes, sizes)


def _sums(x: Tensor, cut: ChunkCut) -> Tensor:
    """x [kept] → of each chunk [chunks]."""
    return x.new_zeros(len(cut.counts)).index_add_(0, cut.chunk_of, x)


def _means(sizes: Tensor, high: Tensor, cut: ChunkCut) -> tuple[Tensor, Tensor, Tensor]:
    """Of each chunk: (mean of those that are not high, of those that are, how many these are); of none it is 0."""
    most = _sums(high.float(), cut)
    upper = _sums(sizes * high, cut)
    lower = _sums(sizes * ~high, cut)
    return lower / (cut.counts - most).clamp_(min=1), upper / most.clamp(min=1), most
