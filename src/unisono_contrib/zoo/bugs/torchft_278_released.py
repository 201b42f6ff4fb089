"""The same, by the released package's own function, with a bucket that does not hold all tensors."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unisono import gradients_of
from unisono_contrib.zoo.bugs.torchft_278 import CAP, reference
from unisono_contrib.zoo.toys import Gradients, batch, network, summed

__all__ = ["reference"]

ADDRESS = "meta-pytorch/torchft#278"
STACK = "torchft 0.2.0 itself"
CAUSE = "not_reduced"
NEEDS = "torchft==0.2.0"


def right(rank: Any, cap: int = 1 << 20) -> Gradients:
    def allreduce(x: Tensor, should_quantize: bool) -> Any:
        x.copy_(summed(x) / rank.world)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([x])
        return SimpleNamespace(get_future=lambda: future)

    model, (x, y) = network(), batch()
    cross_entropy(model(x[rank.rank].flatten(0, 1)), y[rank.rank].flatten()).backward()
    gradients = {name: g.clone() for name, g in gradients_of(model).items()}
    manager = SimpleNamespace(allreduce=allreduce)
    fragment = SimpleNamespace(_manager=manager, should_quantize=False, _allreduce_work=[])
    kind = importlib.import_module("torchft.local_sgd")._StreamingDiLoCoFragment
    kind._bucketize_and_allreduce(fragment, list(gradients.values()), 8 * cap)
    return gradients


def wrong(rank: Any) -> Gradients:
    return right(rank, cap=CAP)
