"""The first and the last stage each hold a copy of a tied embedding, and nobody adds up the gradients of the two."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network, summed

ADDRESS = "uw-syfi/piper#13"
STACK = "pipeline by hand, tied embedding"
CAUSE = "not_reduced"


def _stage() -> nn.ParameterDict:
    return nn.ParameterDict({"embedding": next(network().parameters()).detach().clone()})  # [16, 6]


def _loss(hidden: Tensor, stage: nn.ParameterDict, x: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, stage["embedding"].T), x.argmax(1))


def reference() -> Gradients:
    stage, x = _stage(), batch()[0][0, 0]
    _loss(linear(x, stage["embedding"]).tanh(), stage, x).backward()
    return gradients_of(stage)


def right(rank: Any, tied: bool = True) -> Gradients:
    stage, x = _stage(), batch()[0][0, 0]
    hidden = linear(x, stage["embedding"]).tanh()
    if rank.rank == 0:
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        received = torch.empty_like(hidden, requires_grad=True)
        dist.recv(received.data, 0)
        (gradient,) = torch.autograd.grad(loss := _loss(received, stage, x), received, retain_graph=True)
        dist.send(gradient, 0)
        loss.backward()
    return {name: summed(g) if tied else g for name, g in gradients_of(stage).items()}


def wrong(rank: Any) -> Gradients:
    return right(rank, tied=False)
