"""FSDP2 on memory that is lent: the same bits as by messages, and no more memory the longer it goes on."""

import hashlib
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from torch import nn

from unisono.comm.collectives.memory import live
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.parallel.shard import Sharded
from unisono.plan.options import Wires

pytestmark = pytest.mark.timeout(180)
STEPS, MICROS = 6, 2


def trained(ctx, zero, prefetch, least):
    """(a digest of all parameters after some steps, loans after each step). least: bytes from which memory is lent."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(24, 40 + 8 * i), nn.Tanh(), nn.Linear(40 + 8 * i, 24)) for i in range(4)
    ]
    model = nn.Sequential(nn.Linear(24, 24), *blocks)
    group = Mesh(Shape(shard=ctx.world), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60)).shard
    with patch.object(live, "LENT", least), patch("unisono.parallel.shard.AT_ONCE", 0):
        sharded = Sharded(model, blocks, group, zero, wires=Wires(prefetch=prefetch))
        optimiser, loans = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(STEPS):
            for micro in range(MICROS):
                own = torch.Generator().manual_seed(100 * step + 10 * micro + ctx.rank)
                sharded.before_backward(micro == MICROS - 1)
                model(torch.randn(5, 24, generator=own)).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad()
            memory = getattr(group.algorithm, "_memory", None)
            loans.append(len(memory._lending._loans) if memory is not None else 0)
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.to_local().detach().numpy().tobytes())
    return digest.hexdigest(), loans


@pytest.mark.parametrize(("ranks", "zero", "prefetch"), [(2, 3, 0), (3, 3, 2), (2, 2, 0), (2, 1, 1)])
def test_the_same_bits_whether_memory_is_lent_or_not(world, ranks, zero, prefetch):
    lent = world(trained, ranks, zero=zero, prefetch=prefetch, least=1)
    sent = world(trained, ranks, zero=zero, prefetch=prefetch, least=1 << 40)
    for (bits, loans), (same, none) in zip(lent, sent, strict=True):
        assert bits == same
        assert set(none) == {0} and loans[0] > 1
        assert loans[1] == loans[-1], "what was let go of is lent again"
