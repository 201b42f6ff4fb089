"""Backward in two halves: the same gradients as in one, each in its half, and nothing computed twice."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.parallel.split import backward_in_halves

WIDTH = 4


class Counted(torch.autograd.Function):
    """Tells how often its backward runs."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.times.append(1)
        return grad.clone(), None


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, WIDTH, bias=False), nn.Tanh()
    )


def again(model, x):
    """A block whose activations are computed again in backward."""
    return checkpoint(model, x, use_reentrant=False)


def residual(model, x):
    return x + model(x) * model[0].bias.sum()  # a bias in two places


def both_ways(model, x):
    """Each weight is used twice."""
    return model(model(x))


def positions(model, x):
    """A weight that enters by addition, through another operation."""
    return model(x + model[3].weight[:, 0].exp())


@pytest.mark.parametrize("use", [lambda model, x: model(x), again, residual, both_ways, positions])
def test_two_halves_are_the_whole(use):
    model = layers()
    x = torch.randn(3, WIDTH, requires_grad=True)
    grad = torch.randn(3, WIDTH)
    torch.autograd.backward(use(model, x), grad)
    wanted, wanted_x = [p.grad for p in model.parameters()], x.grad
    model.zero_grad()
    x.grad = None
    towards_weights = backward_in_halves([use(model, x)], [grad], [x])
    assert torch.equal(x.grad, wanted_x)
    assert all(p.grad is None for p in model.parameters())
    towards_weights()
    assert torch.equal(x.grad, wanted_x)
    for p, other in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, other, rtol=1e-6, atol=1e-7)


def test_the_second_half_repeats_nothing_of_the_first():
    times, model = [], layers()
    x = torch.randn(3, WIDTH, requires_grad=True)
    y = model[3](Counted.apply(model[0](Counted.apply(x, times)), times))
    towards_weights = backward_in_halves([y], [torch.ones_like(y)], [x])
    assert len(times) == 2
    towards_weights()
    assert len(times) == 2


def test_a_matrix_product_computes_each_of_its_gradients_once():
    """Counted by the profiler: a linear layer has one product forward, one a half."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    x = torch.randn(3, WIDTH, requires_grad=True)
    y = model(x)

    def products(half):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            result = half()
        return result, sum(event.name == "aten::mm" for event in seen.events())

    towards_weights, first = products(lambda: backward_in_halves([y], [torch.ones_like(y)], [x]))
    _, second = products(towards_weights)
    assert (first, second) == (1, 1)


def test_hooks_hear_each_gradient_once_and_may_change_it():
    model, heard = layers(), []
    model[0].weight.register_hook(lambda grad: 2 * grad)
    model[0].weight.register_post_accumulate_grad_hook(heard.append)
    x = torch.randn(3, WIDTH, requires_grad=True)
    model(x).sum().backward()
    wanted = model[0].weight.grad
    model.zero_grad()
    backward_in_halves([model(x)], [torch.ones(3, WIDTH)], [x])()
    assert torch.equal(model[0].weight.grad, wanted)
    assert len(heard) == 2


def test_without_inputs_all_of_it_is_towards_weights():
    model = layers()
    y = model(torch.randn(3, WIDTH))
    towards_weights = backward_in_halves([y], [torch.ones_like(y)], [])
    assert all(p.grad is None for p in model.parameters())
    towards_weights()
    assert all(p.grad is not None for p in model.parameters())
    backward_in_halves([], [], [])()  # nor outputs: nothing to do


def test_it_adds_to_what_is_there():
    model = layers()
    x = torch.randn(3, WIDTH, requires_grad=True)
    for _ in range(2):
        backward_in_halves([model(x)], [torch.ones(3, WIDTH)], [x])()
    twice = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(twice, 2 * model[0].weight.grad)
