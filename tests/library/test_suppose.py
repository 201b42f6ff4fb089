"""One device is played again with one mistake in its forward."""

import torch
from torch.nn.functional import cross_entropy, linear

from unisono.library.suppose import BiasTimes, supposed


def gradients():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    cross_entropy(net(torch.randn(5, 3)), torch.tensor([0, 1, 0, 1, 1])).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def test_a_layers_bias_counts_so_often_with_or_without_its_gradient():
    x, w, b = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4, requires_grad=True)
    for with_gradient, times in ((True, 3), (False, 1)):
        with BiasTimes((4, 3), 3, with_gradient):
            y = linear(x, w, b)
        assert torch.allclose(y, linear(x, w) + 3 * b)
        (grad,) = torch.autograd.grad(y.sum(), b)
        assert torch.allclose(grad, torch.full((4,), 2.0 * times))
    with BiasTimes((4, 4), 3):
        assert torch.equal(linear(x, w, b), linear(x, w) + b) or torch.allclose(
            linear(x, w, b), linear(x, w) + b
        )


def test_each_linear_layer_with_a_bias_is_supposed():
    tries = list(supposed(gradients, 2, lambda: None))
    assert ["[4, 3]" in text or "[2, 4]" in text for text, _ in tries] == [True] * 4
    assert all(not torch.allclose(parts[0]["0.weight"], gradients()["0.weight"]) for _, parts in tries)
