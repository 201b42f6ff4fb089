"""Causal attention by virtual shards: some heads and one stretch of the queries at a time, to all keys before them.

Shapes: B batch, H heads, G key/value heads, T positions of this rank, S all positions, K head width.
"""

import math

import torch
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.models.noise import Dropout, Noise
from unisono.parallel.tensor import Crossing
from unisono.spec.layout import Places
from unisono_contrib.parallel.virtual.deal import VirtualDeal, fan, solid


def _gathered(x: Tensor, group: Group) -> Tensor:
    return group.all_gather(x.transpose(0, 2).contiguous()).transpose(0, 2).contiguous()


def _part_here(grad: Tensor, group: Group) -> Tensor:
    return grad.chunk(group.size, 2)[group.index].contiguous()


def all_positions(x: Tensor, group: Group) -> Tensor:
    """[B, G, T, K] → [B, G, S, K]. Its gradient is the same on all ranks of `cp`, so each keeps its part."""
    if group.size == 1:
        return x
    return Crossing.apply(x, group, _gathered, _part_here, x.dtype)  # type: ignore[return-value]


class VirtualCore(nn.Module):
    """In the place of a model's attention core; draws the same masks as it does."""

    def __init__(self, drop: Dropout, deal: VirtualDeal, heads: int) -> None:
        super().__init__()
        self.drop, self.deal, self.heads = drop, deal, heads

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, noise: Noise | None) -> Tensor:
        deal = self.deal
        k_BGSK, v_BGSK = (all_positions(x, deal.cp) for x in (k_BGTK, v_BGTK))
        first, parts = deal.tp.index * q_BHTK.shape[1], []
        by_heads = zip(*(x.chunk(deal.features, 1) for x in (q_BHTK, k_BGSK, v_BGSK)), strict=True)
        for q, k, v in by_heads:
            parts.append(self._some_heads(q, k, v, first, noise))
            first += q.shape[1]
        return torch.cat(parts, 1)

    def _some_heads(self, q: Tensor, k: Tensor, v: Tensor, head: int, noise: Noise | None) -> Tensor:
        deal = self.deal
        each = q.shape[1] // k.shape[1]
        keys, values = (fan(solid(x), deal.stretches, deal.cp) for x in (k, v))
        first, parts = deal.cp.index * q.shape[2], []
        for p, heads in enumerate(deal.along(q, 2)):
            end = first + heads.shape[2]
            key, value = (solid(x[p][:, :, :end]).repeat_interleave(each, 1) for x in (keys, values))
            parts.append(solid(self._attend(heads, key, value, (head, first), noise)))
            first = end
        return torch.cat(parts, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, at: tuple[int, int], noise: Noise | None) -> Tensor:
        """at: the first head and the first position of the queries."""
        (rows, columns), (head, first) = (q.shape[2], k.shape[2]), at
        score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1 + first)
        if noise is not None and noise.documents is not None:
            later = later | noise.documents.apart(slice(first, first + rows), slice(columns))
        weight = score.masked_fill(later, float("-inf")).softmax(-1)
        if noise is not None and self.drop.drops(noise):
            full = self.deal.cp.size * self.deal.stretches * rows
            places = {
                1: Places(self.heads, ((head, q.shape[1]),)),
                2: Places(full, ((first, rows),)),
                3: Places(full, ((0, columns),)),
            }
            weight = self.drop.at(places)(weight, noise)
        return weight.to(v.dtype) @ v
