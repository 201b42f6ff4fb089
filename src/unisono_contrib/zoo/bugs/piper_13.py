"""The first and the last stage each hold a copy of a tied embedding, and nobody adds up the gradients of the two."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network, summed

ADDRESS = "uw-syfi/piper#13"
STACK = "pipeline by hand, tied embedding"
CAUSE = "not_reduced"


def _embedding() -> nn.Parameter:
    return nn.Parameter(next(network().parameters()).detach().clone())  # [16, 6]


def reference() -> Gradients:
    weight, (x, _) = _embedding(), batch()
    hidden = linear(x[0, 0], weight).tanh()
    cross_entropy(linear(hidden, weight.T), x[0, 0].argmax(1)).backward()
    return {"embedding": weight.grad} if weight.grad is not None else {}


def right(rank: Any, tied: bool = True) -> Gradients:
    stage, (x, _) = nn.ParameterDict({"embedding": _embedding()}), batch()
    weight = stage["embedding"]
    if rank.rank == 0:
        hidden = linear(x[0, 0], weight).tanh()
        dist.send(hidden.detach(), 1)
        gradient = hidden.detach().clone()
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = x.new_empty(len(x[0, 0]), 16)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        cross_entropy(linear(hidden, weight.T), x[0, 0].argmax(1)).backward()
        dist.send(hidden.grad if hidden.grad is not None else hidden, 0)
    return {name: summed(g) if tied else g for name, g in gradients_of(stage).items()}


def wrong(rank: Any) -> Gradients:
    return right(rank, tied=False)
