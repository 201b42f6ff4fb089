"""Layers whose products have the shape of one virtual shard, whatever a rank holds of them.

Shapes: B batch, T positions of this rank, D width, V vocabulary. Positions are whole on every rank of `tp`: what it
leaves whole, such as a norm, all its ranks compute alike.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.noise import Noise
from unisono.parallel.parts import Cut
from unisono_contrib.parallel.virtual.deal import VirtualDeal, fan, solid, total


class VirtualColumn(nn.Module):
    """Output features are dealt; those of whole heads lie together where the heads can be dealt evenly."""

    def __init__(self, whole: nn.Linear, deal: VirtualDeal) -> None:
        super().__init__()
        self.deal, self.sizes = deal, deal.sizes(whole.out_features)
        cut = deal.cut(0, whole.out_features)
        rows = slice(cut.start, cut.start + cut.size)
        self.weight = nn.Parameter(whole.weight.detach()[rows].clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach()[rows].clone())
        self.cuts = {"weight": cut, "bias": cut}

    def forward(self, x_BTD: Tensor) -> Tensor:
        deal, n = self.deal, self.deal.stretches
        weights = [fan(solid(w), n, deal.cp) for w in self.weight.split(self.sizes)]
        biases = _fans(self.bias, self.sizes, deal)
        parts = []
        for p, x in enumerate(deal.along(x_BTD)):
            uses = fan(x, deal.features, deal.tp)
            products = [
                solid(F.linear(use, w[p], b[p])) for use, w, b in zip(uses, weights, biases, strict=True)
            ]
            parts.append(torch.cat(products, -1))
        return torch.cat(parts, 1)


def _fans(bias: Tensor | None, sizes: Sequence[int], deal: VirtualDeal) -> Sequence[Sequence[Tensor | None]]:
    """Of each shard, the bias for each stretch of the positions; None throughout where there is no bias."""
    if bias is None:
        return [[None] * deal.stretches for _ in sizes]
    return [fan(solid(b), deal.stretches, deal.cp) for b in bias.split(list(sizes))]


class VirtualRow(nn.Module):
    """Input features are dealt, and the shards' products added up. The bias stays whole and is added after."""

    def __init__(self, whole: nn.Linear, deal: VirtualDeal) -> None:
        super().__init__()
        self.deal, self.sizes = deal, deal.sizes(whole.in_features)
        cut = deal.cut(1, whole.in_features)
        self.weight = nn.Parameter(whole.weight.detach()[:, cut.start : cut.start + cut.size].clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())
        self.cuts = {"weight": cut}

    def forward(self, x_BTD: Tensor) -> Tensor:
        deal, n = self.deal, self.deal.stretches
        weights = [fan(solid(w), n, deal.cp) for w in self.weight.split(self.sizes, 1)]
        bias = None if self.bias is None else fan(self.bias, n, deal.cp)
        parts = []
        for p, x in enumerate(deal.along(x_BTD)):
            terms = [
                solid(F.linear(solid(part), w[p]))
                for part, w in zip(x.split(self.sizes, -1), weights, strict=True)
            ]
            y = total(terms, deal.tp)
            parts.append(solid(y if bias is None else y + bias[p]))
        return torch.cat(parts, 1)


class VirtualLinear(nn.Module):
    """A layer that `tp` leaves whole, such as half of an adapter, one stretch of the positions at a time."""

    def __init__(self, whole: nn.Linear, deal: VirtualDeal) -> None:
        super().__init__()
        self.deal, self.weight, self.bias = deal, whole.weight, whole.bias
        self.cuts: dict[str, Cut] = {}

    def forward(self, x_BTD: Tensor) -> Tensor:
        deal, n = self.deal, self.deal.stretches
        weights = fan(self.weight, n, deal.cp)
        biases = [None] * n if self.bias is None else fan(self.bias, n, deal.cp)
        uses = zip(deal.along(x_BTD), weights, biases, strict=True)
        return torch.cat([solid(F.linear(solid(x), w, b)) for x, w, b in uses], 1)


class VirtualTable(nn.Module):
    """Rows of an embedding are dealt; tokens of other shards give zero."""

    def __init__(self, whole: nn.Embedding, deal: VirtualDeal) -> None:
        super().__init__()
        self.deal, self.sizes = deal, deal.sizes(whole.num_embeddings)
        cut = deal.cut(0, whole.num_embeddings)
        self.start = cut.start
        self.weight = nn.Parameter(whole.weight.detach()[cut.start : cut.start + cut.size].clone())
        self.cuts = {"weight": cut}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        deal = self.deal
        shards = [fan(solid(w), deal.stretches, deal.cp) for w in self.weight.split(self.sizes)]
        parts = []
        for p, tokens in enumerate(tokens_BT.chunk(deal.stretches, 1)):
            terms, first = [], self.start
            for w, size in zip(shards, self.sizes, strict=True):
                local = tokens - first
                foreign = (local < 0) | (local >= size)
                rows = F.embedding(local.masked_fill(foreign, 0), w[p])
                terms.append(rows.masked_fill(foreign.unsqueeze(-1), 0.0))
                first += size
            parts.append(solid(total(terms, deal.tp)))
        return torch.cat(parts, 1)


class VirtualNorm(nn.Module):
    """A norm over the width, one stretch of the positions at a time."""

    def __init__(self, whole: nn.LayerNorm | nn.RMSNorm, deal: VirtualDeal) -> None:
        super().__init__()
        self.deal, self.shape, self.eps = deal, list(whole.normalized_shape), whole.eps
        self.rms = isinstance(whole, nn.RMSNorm)
        self.weight, self.bias = whole.weight, getattr(whole, "bias", None)
        self.cuts: dict[str, Cut] = {}

    def forward(self, x_BTD: Tensor) -> Tensor:
        deal = self.deal
        weights = fan(self.weight, deal.stretches, deal.cp)
        biases = [None] * deal.stretches if self.bias is None else fan(self.bias, deal.stretches, deal.cp)
        return torch.cat(
            [self._norm(x, w, b) for x, w, b in zip(deal.along(x_BTD), weights, biases, strict=True)], 1
        )

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.rms:
            return solid(F.rms_norm(x, self.shape, weight, self.eps))
        return solid(F.layer_norm(x, self.shape, weight, bias, self.eps or 1e-5))


class VirtualPositions(nn.Module):
    """A learned row is added to each position, one stretch of them at a time."""

    def __init__(self, whole: nn.Module, deal: VirtualDeal) -> None:
        super().__init__()
        self.deal, self.weight = deal, whole.weight
        self.cuts: dict[str, Cut] = {}

    def forward(self, x_BTD: Tensor, noise: Noise | None = None) -> Tensor:
        deal, documents = self.deal, None if noise is None else noise.documents
        first, parts = deal.cp.index * x_BTD.shape[1], []
        tables = fan(self.weight, deal.stretches, deal.cp)  # type: ignore[arg-type]
        for x, table in zip(deal.along(x_BTD), tables, strict=True):
            here = slice(first, first + x.shape[1])
            rows = table[here] if documents is None else F.embedding(documents.positions[:, here], table)
            parts.append(solid(x + rows))
            first = here.stop
        return torch.cat(parts, 1)
