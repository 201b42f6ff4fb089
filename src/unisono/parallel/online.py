"""Attention over keys and values that come rank by rank, with a softmax that is never whole.

The part of each block is weighted by its share of the sum so far (Milakov & Gimelshein, Online normalizer calculation
for softmax, 2018). Kept for backward are queries, keys and values of this rank, the output, and one number a query, the
logarithm of its sum; weights are computed again from it (Dao et al., FlashAttention, 2022).

On a CPU blocks without dropout take torch's fused kernels. On other devices, and with dropout, they are matrix
products; that path has been run on CPUs alone.

Shapes: B batch, H query heads, G key/value heads, t queries, s keys, K head width.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unisono.comm.device import attention_kernels, casting
from unisono.models.noise import Dropout, Noise, numbers
from unisono.parallel.attend import tiles
from unisono.spec.layout import Places

See = Callable[[int, Tensor], None]
GradOf = Callable[[int, Tensor], Tensor]


class Transport(Protocol):
    """How keys and values [2, B, G, s, K] of all ranks are seen here. Every rank calls each method at once."""

    def show(self, part: Tensor, see: See) -> None:
        """see(rank, keys and values of that rank) once for each."""
        ...

    def collect(self, part: Tensor, grad_of: GradOf) -> Tensor:
        """The sum over all ranks of what each makes of this rank's keys and values: grad_of(rank, those of that rank),
        called once for each, gives a tensor that may be written over."""
        ...


class OnlineCore(nn.Module):
    """Attention of this rank's queries to the keys of all, as `core` attends on one device: see `models.gpt.net.Core`,
    and for window and softcap, where it has them, `models.hf.attention.ForeignCore`. places: of each rank."""

    def __init__(self, core: nn.Module, transport: Transport, places: Sequence[Places], index: int) -> None:
        super().__init__()
        self.drop: Dropout = core.drop  # type: ignore[assignment]
        self.window: int = getattr(core, "window", 0)
        self.softcap: float = getattr(core, "softcap", 0.0)
        self.causal: bool = getattr(core, "causal", True)
        self.transport, self.held, self.index = transport, places, index

    def forward(self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, noise: Noise | None) -> Tensor:
        return OnlineAttention.apply(q_BHtK, k_BGtK, v_BGtK, self, noise)  # type: ignore[return-value]

    def blocks(self, rank: int) -> list[tuple[slice, slice, bool]]:
        """What of this rank's queries and of that rank's keys belongs together, see `tiles`."""
        mine, theirs = self.held[self.index], self.held[rank]
        return tiles(mine, theirs) if self.causal else [(slice(0, mine.size), slice(0, theirs.size), False)]

    def mask(self, like: Tensor, noise: Noise | None, rank: int, rows: slice, keys: slice) -> Tensor | None:
        """[B, H, t, s] of zeros and 1 / (1 - p), by what attention weights are multiplied with; None for ones."""
        if noise is None or not self.drop.drops(noise):
            return None
        mine, theirs = self.held[self.index], self.held[rank]
        cut = {
            2: mine.part(rows.start, rows.stop - rows.start),
            3: theirs.part(keys.start, keys.stop - keys.start),
        }
        shape = torch.Size((*like.shape[:2], cut[2].size, cut[3].size))
        return self.drop.at(cut).mask(shape, noise, like.dtype) * (1.0 / (1.0 - self.drop.p))

    def apart(
        self, noise: Noise | None, rank: int, rows: slice, keys: slice, device: torch.device
    ) -> Tensor | None:
        """bool, [B, 1, t, s] or [t, s]: which keys are of another document than the query, or too far back; None where
        there are none."""
        documents = None if noise is None else noise.documents
        if documents is None and not self.window:
            return None
        mine, theirs = numbers(self.held[self.index], device)[rows], numbers(self.held[rank], device)[keys]
        far = (mine[:, None] - theirs) >= self.window if self.window else None
        if documents is None:
            return far
        other = documents.apart(mine, theirs)
        return other if far is None else other | far


class OnlineAttention(torch.autograd.Function):
    """queries [B, H, t, K], keys and values [B, G, t, K] of this rank → [B, H, t, K]."""

    @staticmethod
    def forward(ctx, q, k, v, core, noise):  # type: ignore[override]
        q, wide = _in_rows(q), torch.promote_types(q.dtype, torch.float32)
        # Heads of a position lie together, as the projection behind reads them: it needs no copy then.
        out = torch.zeros_like(
            q.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format
        ).transpose(1, 2)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)

        def see(rank: int, theirs: Tensor) -> None:
            for rows, keys, causal in core.blocks(rank):
                mask = core.mask(lse, noise, rank, rows, keys)
                apart = core.apart(noise, rank, rows, keys, q.device)
                k, v = theirs[:, :, :, keys]
                part, sums = block(q[:, :, rows], k, v, causal, mask, apart, core.softcap)
                old = lse[:, :, rows]
                new = torch.logaddexp(old, sums)
                here = out[:, :, rows]
                here.mul_(_share(old, new).unsqueeze(-1)).add_(part * _share(sums, new).unsqueeze(-1))
                old.copy_(new)

        with torch.autocast(casting(q.device), enabled=False):
            core.transport.show(torch.stack((k, v)).contiguous(), see)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.core, ctx.noise = core, noise
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        grad = _in_rows(grad)
        core, dq = ctx.core, torch.zeros_like(lse).unsqueeze(-1).repeat(1, 1, 1, q.shape[-1])

        def grad_of(rank: int, theirs: Tensor) -> Tensor:
            both = theirs.new_zeros(theirs.shape, dtype=lse.dtype)
            for rows, keys, causal in core.blocks(rank):
                mask = core.mask(lse, ctx.noise, rank, rows, keys)
                apart = core.apart(ctx.noise, rank, rows, keys, q.device)
                saved = grad[:, :, rows], out[:, :, rows], lse[:, :, rows]
                k, v = theirs[:, :, :, keys]
                mine, *others = block_grads(q[:, :, rows], k, v, *saved, causal, mask, apart, core.softcap)
                dq[:, :, rows] += mine
                for total, part in zip(both[:, :, :, keys], others, strict=True):
                    total += part
            return both

        with torch.autocast(casting(q.device), enabled=False):
            dk, dv = core.transport.collect(torch.stack((k, v)).contiguous(), grad_of)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None,
    apart: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys alone: ([B, H, t, K], the logarithm of each query's sum [B, H, t]).

    causal: each query sees keys up to its own place; there are as many. mask: by what weights are multiplied, once they
    are divided by the sum. apart [B, 1, t, s]: the keys that a query does not see; one that sees none has zeros, and
    the logarithm of zero. softcap: scores are squashed to ± this, if not 0.
    """
    k, v = (_of_each_query(x, q) for x in (k, v))
    kernels = attention_kernels(q) if mask is None and apart is None and not softcap else None
    if kernels is not None:
        return kernels[0](q, k, v, 0.0, causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    score = _seen(_scores(q.to(wide), k.to(wide), softcap), causal, apart)
    sums = score.logsumexp(-1)
    weight = _share(score, sums.unsqueeze(-1))
    return (weight if mask is None else weight.mul_(mask)) @ v.to(wide), sums


def block_grads(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Tensor | None,
    apart: Tensor | None = None, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What one block adds to the gradients of queries, keys and values. grad, out, lse: of these queries' attention to
    all keys that they see."""
    groups = k.shape[1]
    k, v = (_of_each_query(x, q) for x in (k, v))
    kernels = attention_kernels(q) if mask is None and apart is None and not softcap else None
    if kernels is not None:
        dq, dk, dv = kernels[1](grad, q, k, v, out, lse, 0.0, causal)
    else:
        wide = lse.dtype
        q, k, v, grad, out = (x.to(wide) for x in (q, k, v, grad, out))
        score = _scores(q, k, softcap)
        slope = 1.0 - (score / softcap).square() if softcap else None
        weight = (_seen(score, causal, apart) - lse.unsqueeze(-1)).exp_()
        dv = (weight if mask is None else weight * mask).transpose(-1, -2) @ grad
        towards = grad @ v.transpose(-1, -2)
        towards = towards if mask is None else towards.mul_(mask)
        towards = towards.sub_((grad * out).sum(-1, keepdim=True)).mul_(weight).div_(math.sqrt(q.shape[-1]))
        towards = towards if slope is None else towards.mul_(slope)
        dq, dk = towards @ k, towards.transpose(-1, -2) @ q
    return dq, _of_each_group(dk, groups), _of_each_group(dv, groups)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), of logarithms; nothing of nothing is nothing."""
    return (part - whole.clamp_min(torch.finfo(whole.dtype).min)).exp_()


def _scores(q: Tensor, k: Tensor, softcap: float) -> Tensor:
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (score / softcap).tanh() * softcap if softcap else score


def _seen(score: Tensor, causal: bool, apart: Tensor | None) -> Tensor:
    """The scores, of keys that a query does not see -∞; in place."""
    if causal:
        later = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
        score = score.masked_fill_(later, -math.inf)
    return score if apart is None else score.masked_fill_(apart, -math.inf)


def _in_rows(x: Tensor) -> Tensor:
    """x, whose last dim is dense: the fused kernels take that for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _of_each_query(x_BGsK: Tensor, q: Tensor) -> Tensor:
    """[B, G, s, K] → [B, H, s, K]: one for each query head."""
    return (
        x_BGsK.repeat_interleave(q.shape[1] // x_BGsK.shape[1], dim=1)
        if q.shape[1] > x_BGsK.shape[1]
        else x_BGsK
    )


def _of_each_group(x_BHsK: Tensor, groups: int) -> Tensor:
    """[B, H, s, K] → [B, G, s, K], summed over the queries of each group."""
    return x_BHsK.unflatten(1, (groups, -1)).sum(2) if x_BHsK.shape[1] > groups else x_BHsK
