"""Under FSDP each rank clips the pieces that it holds by the norm of these pieces alone."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unisono import gradients_of
from unisono_contrib.zoo.toys import Gradients, batch, network

ADDRESS = "PrimeIntellect-ai/OpenDiloco#6"
STACK = "FSDP2"
CAUSE = "partial_norm"
LAYOUT = {"*": Shard(0)}
LARGEST = 1e-2


def reference() -> Gradients:
    model, (x, y) = network(), batch()
    cross_entropy(model(x.flatten(0, 2)), y.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
    return gradients_of(model)


def right(rank: Any, local: bool = False) -> Gradients:
    model, (x, y) = network(), batch()
    fully_shard(model, mesh=init_device_mesh("cpu", (rank.world,)))
    cross_entropy(model(x[rank.rank].flatten(0, 1)), y[rank.rank].flatten()).backward()
    gradients = [g for g in gradients_of(model).values() if isinstance(g, DTensor)]
    norm = get_total_norm([g.to_local() if local else g for g in gradients])
    clip_grads_with_norm_(model.parameters(), LARGEST, norm if local else norm.full_tensor())  # type: ignore[attr-defined]
    return {name: g.to_local() for name, g in gradients_of(model).items() if isinstance(g, DTensor)}


def wrong(rank: Any) -> Gradients:
    return right(rank, local=True)
