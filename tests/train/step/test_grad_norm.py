"""Clipping: what a fused optimiser divides in its registers is, to the last bit, what clipping first gives."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from unisono.train.step.grad_norm import clip
from unisono.train.step.update import clip_and_step

SHAPES = ((33, 7), (128, 16), (5,), (1,))


def made(dtype):
    gen = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(shape, generator=gen, dtype=dtype)) for shape in SHAPES]
    for p in params:
        p.grad = torch.randn(p.shape, generator=gen, dtype=dtype)
    return params, [SimpleNamespace(master=p) for p in params]


@pytest.mark.parametrize("limit", [0.0, 0.37, 1e9])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_clipping_inside_the_step_is_clipping_before_it(kind, dtype, fused, limit):
    (first, slots), (second, others) = made(dtype), made(dtype)
    one, two = kind(first, lr=0.1, fused=fused), kind(second, lr=0.1, fused=fused)
    norm = float(torch.cat([p.grad.flatten() for p in first]).norm())
    for _ in range(3):
        clip_and_step(one, slots, norm, limit)
        clip(others, norm, limit)
        two.step()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)
    assert str(one.state_dict()["state"]) == str(two.state_dict()["state"])


def test_a_clipped_norm_is_the_limit_and_the_optimiser_is_as_it_was():
    params, slots = made(torch.float32)
    norm = float(torch.cat([p.grad.flatten() for p in params]).norm())
    optimizer = AdamW(params, lr=0.1, fused=True)
    before = copy.copy(vars(optimizer))
    clip_and_step(optimizer, slots, norm, norm / 4)
    assert float(torch.cat([p.grad.flatten() for p in params]).norm()) == pytest.approx(norm / 4, rel=1e-5)
    assert vars(optimizer).keys() == before.keys()
