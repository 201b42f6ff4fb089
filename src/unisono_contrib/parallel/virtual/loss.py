"""Summed cross-entropy over logits whose classes and positions are dealt as virtual shards."""

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.group import Group
from unisono.comm.tree import tree_sum
from unisono.parallel.tensor import Crossing, as_it_is
from unisono.spec.training import IGNORED
from unisono_contrib.parallel.virtual.deal import VirtualDeal, across, solid, total


class VirtualCrossEntropy(torch.autograd.Function):
    """Of one stretch of the positions: logits of each virtual shard of this rank, [N, v] each."""

    @staticmethod
    def forward(ctx, targets_N, start, group, *shards):  # type: ignore[override]
        top_N = torch.stack([x.max(-1).values for x in shards]).max(0).values
        top_N = group.all_reduce(top_N, dist.ReduceOp.MAX)
        powers, sums, hits, saved = [], [], [], []
        for x_Nv in shards:
            shifted_Nv = x_Nv - top_N[:, None]
            local_N = targets_N - start
            own_N = (local_N >= 0) & (local_N < x_Nv.shape[1])
            index_N1 = local_N.masked_fill(~own_N, 0)[:, None]
            hits.append(shifted_Nv.gather(1, index_N1)[:, 0].masked_fill(~own_N, 0.0))
            powers.append(shifted_Nv.exp())
            sums.append(powers[-1].sum(-1))
            saved += [index_N1, own_N]
            start += x_Nv.shape[1]
        both_2N = across(torch.stack((tree_sum(sums), tree_sum(hits))), group)
        out_N = targets_N == IGNORED
        ctx.save_for_backward(*(x.div_(both_2N[0][:, None]) for x in powers), *saved, out_N)
        return (both_2N[0].log() - both_2N[1]).masked_fill_(out_N, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        n = len(ctx.saved_tensors) // 3
        shares, (*saved, out_N) = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        each_N1 = grad.expand(out_N.shape).masked_fill(out_N, 0.0)[:, None]
        grads = [
            share.scatter_add(1, index, -part.to(share.dtype)[:, None]) * each_N1
            for share, index, part in zip(shares, saved[::2], saved[1::2], strict=True)
        ]
        return None, None, None, *grads


def at_first(x: Tensor, group: Group) -> Tensor:
    """Return a number that all ranks have on the first rank, and zero on the others."""
    return x.clone() if group.index == 0 else torch.zeros_like(x)


def virtual_loss(deal: VirtualDeal, classes: int):
    """(logits [B, T, v] of this rank, targets [B, T]) → the loss of all positions on the first rank of `cp`, zero on
    its others: the ranks' losses are added up elsewhere."""
    sizes, start = deal.sizes(classes), deal.cut(0, classes).start

    def loss(logits_BTv: Tensor, targets_BT: Tensor) -> Tensor:
        half = logits_BTv.dtype in (torch.bfloat16, torch.float16)
        logits = logits_BTv.float() if half else logits_BTv
        terms = [
            VirtualCrossEntropy.apply(
                targets.flatten(), start, deal.tp, *(solid(x.flatten(0, 1)) for x in part.split(sizes, -1))
            )
            for part, targets in zip(deal.along(logits), targets_BT.chunk(deal.stretches, 1), strict=True)
        ]
        whole = total(terms, deal.cp)
        return Crossing.apply(whole, deal.cp, at_first, as_it_is, whole.dtype)  # type: ignore[return-value]

    return loss
