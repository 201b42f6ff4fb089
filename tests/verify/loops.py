"""Hand-written parallel loops that know nothing of Unisono, right and wrong ones, and what one device makes of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from unisono import gradients_of

RANKS, MICROS = 2, 3


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def batch():
    """[ranks, micro-batches, samples, ...]"""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RANKS, MICROS, 5, 6, generator=generator)
    return x, torch.randint(0, 4, (RANKS, MICROS, 5), generator=generator)


def whole():
    net, (x, y) = model(), batch()
    cross_entropy(net(x.flatten(0, 2)), y.flatten()).backward()
    return gradients_of(net)


def shares():
    """The same, one share for each rank and micro-batch."""
    found = []
    x, y = batch()
    for r in range(RANKS):
        for m in range(MICROS):
            net = model()
            (cross_entropy(net(x[r, m]), y[r, m]) / (RANKS * MICROS)).backward()
            found.append(gradients_of(net))
    return found


def _ddp(rank, scale, synced):
    net, (x, y) = DistributedDataParallel(model()), batch()
    for m in range(MICROS):
        net.require_backward_grad_sync = synced(m)
        (cross_entropy(net(x[rank.rank, m]), y[rank.rank, m]) * scale).backward()
    return gradients_of(net)


def ddp(rank):
    return _ddp(rank, 1 / MICROS, lambda m: m == MICROS - 1)


def ddp_mean_forgotten(rank):
    return _ddp(rank, 1.0, lambda m: m == MICROS - 1)


def ddp_sync_on_the_first(rank):
    return _ddp(rank, 1 / MICROS, lambda m: m == 0)


def ddp_never_synced(rank):
    return _ddp(rank, 1 / MICROS, lambda m: False)


def ddp_zeroed_between(rank):
    net, (x, y) = DistributedDataParallel(model()), batch()
    for m in range(MICROS):
        net.zero_grad()
        (cross_entropy(net(x[rank.rank, m]), y[rank.rank, m]) / MICROS).backward()
    return gradients_of(net)


def ddp_rounded(rank):
    return {name: x.bfloat16().to(x.dtype) for name, x in ddp(rank).items()}


def fsdp(rank):
    net, (x, y) = model(), batch()
    fully_shard(net, mesh=init_device_mesh("cpu", (rank.world,)))
    for m in range(MICROS):
        net.set_requires_gradient_sync(m == MICROS - 1)
        (cross_entropy(net(x[rank.rank, m]), y[rank.rank, m]) / MICROS).backward()
    return gradients_of(net)


def fsdp_summed(rank):
    return {name: x * rank.world for name, x in fsdp(rank).items()}


# A layer split by hand: columns of the first matrix and rows of the second on each rank ------------------------------


class _Copy(torch.autograd.Function):
    """Forward as it is, backward summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    """Forward summed over ranks, backward as it is."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def _weights():
    generator = torch.Generator().manual_seed(3)
    shapes = {"inner": (5, 5), "up": (8, 5), "down": (5, 8)}
    return {name: torch.randn(s, generator=generator, requires_grad=True) for name, s in shapes.items()}


def layer():
    w, x = _weights(), torch.ones(3, 5)
    (torch.tanh(torch.tanh(x @ w["inner"].T) @ w["up"].T) @ w["down"].T).square().mean().backward()
    return {name: p.grad for name, p in w.items()}


def _split(rank, enter):
    w, x = _weights(), torch.ones(3, 5)
    up = w["up"].detach().chunk(rank.world, 0)[rank.rank].requires_grad_()
    down = w["down"].detach().chunk(rank.world, 1)[rank.rank].requires_grad_()
    h = enter(torch.tanh(x @ w["inner"].T))
    _Sum.apply(torch.tanh(h @ up.T) @ down.T).square().mean().backward()
    return {"inner": w["inner"].grad, "up": up.grad, "down": down.grad}


def split(rank):
    return _split(rank, _Copy.apply)


def split_without_backward_sum(rank):
    return _split(rank, lambda x: x)


def tokens(vocab, context):
    """A user's model, for our plans."""
    return nn.Sequential(nn.Embedding(vocab, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, vocab))
