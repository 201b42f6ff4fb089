"""What FSDP2 sends on Gloo in a step: four times (n-1)/n of the parameters' bytes by itself, three through our groups."""

import hashlib
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.conformance.test_collectives import carried
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.parallel.shard import Sharded

pytestmark = pytest.mark.timeout(120)


def stepped(ctx, ours):
    """Bytes that this process's sockets sent in the second step, those of the parameters, and a digest of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    nbytes = sum(p.nbytes for p in model.parameters())
    group = Mesh(Shape(shard=ctx.world), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60)).shard
    if ours:
        Sharded(model, list(model), group, 3)
    else:
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=module is not model)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(ctx.rank))
    before = 0
    for _ in range(2):
        model.zero_grad()
        group.barrier()
        before = carried()
        model(x).square().sum().backward()
        group.barrier()
    sent, digest = carried() - before, hashlib.sha256()
    for p in model.parameters():
        assert isinstance(p.grad, DTensor)
        digest.update(p.grad.to_local().numpy().tobytes())
    return [sent, nbytes, digest.hexdigest()]


def test_a_sharded_step_sends_three_quarters_of_what_fsdp2_sends_with_the_same_bits(world) -> None:
    theirs, ours = (world(stepped, 2, ours=ours) for ours in (False, True))
    for (four, nbytes, bits), (three, _, same) in zip(theirs, ours, strict=True):
        whole = nbytes / 2  # (n - 1) / n of them
        assert 3.9 * whole < four < 4.2 * whole
        assert 2.7 * whole < three < 3.1 * whole
        assert bits == same
