"""Tensor parallelism: uneven vocabularies, layers without sequence, and the loss over dealt logits."""

from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.parallel.parts import part_of
from unisono.parallel.tensor import ColumnLinear, RowLinear, VocabEmbedding, vocab_loss

pytestmark = pytest.mark.timeout(120)


def mesh_of(ctx):
    return Mesh(Shape(tp=ctx.world), ctx.rank, Recorder(), timedelta(seconds=60))


def uneven_loss(ctx, vocab):
    torch.manual_seed(0)
    tp = mesh_of(ctx).tp
    logits = torch.randn(2, 3, vocab, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, vocab, (2, 3))
    start, size = part_of(vocab, tp)
    mine = logits.detach()[..., start : start + size].clone().requires_grad_()
    own = vocab_loss(tp, start)(mine, targets)
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (own * 0.5).backward()
    (whole * 0.5).backward()
    gap = (mine.grad - logits.grad[..., start : start + size]).abs().max().item()
    return {"loss": abs((own - whole).item()), "grad": gap, "size": size}


def test_dealt_cross_entropy_equals_the_whole(threads):
    results = threads(uneven_loss, 3, vocab=7)
    assert [r["size"] for r in results] == [3, 2, 2]
    assert all(r["loss"] < 1e-12 and r["grad"] < 1e-12 for r in results)


def pair_of_layers(ctx, sequence):
    torch.manual_seed(0)
    tp = mesh_of(ctx).tp
    up, down = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
    table = nn.Embedding(5, 6).double()
    tokens = torch.randint(0, 5, (2, 4))
    split_table = VocabEmbedding(table, tp, sequence)
    split_up, split_down = ColumnLinear(up, tp, sequence), RowLinear(down, tp, sequence)
    y = split_down(F.gelu(split_up(split_table(tokens))))
    expected = down(F.gelu(up(table(tokens))))
    weights = torch.randn(2, 4, 6, dtype=torch.float64)
    (expected * weights).sum().backward()
    part = slice(ctx.rank * 2, ctx.rank * 2 + 2) if sequence else slice(None)
    (y * weights[:, part]).sum().backward()
    start, size = part_of(8, tp)
    rows, _ = part_of(5, tp)
    own = split_table.weight.grad
    return {
        "y": (y - expected[:, part]).abs().max().item(),
        "up": (split_up.weight.grad - up.weight.grad[start : start + size]).abs().max().item(),
        "down": (split_down.weight.grad - down.weight.grad[:, start : start + size]).abs().max().item(),
        "table": (own - table.weight.grad[rows : rows + own.shape[0]]).abs().max().item(),
    }


@pytest.mark.parametrize("sequence", [4, 0])
def test_split_layers_equal_whole_ones(threads, sequence):
    for result in threads(pair_of_layers, 2, sequence=sequence):
        assert max(result.values()) < 1e-12, result
