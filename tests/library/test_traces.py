"""What is known of a value that was computed from a batch: where its samples lie, and whether they have met."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.library.batch_tracer import BatchTracer
from unisono.library.traces import SampleTrace

Act = Callable[[Tensor, Tensor], Any]


def traced(act: Act, weighed: bool = False) -> SampleTrace | None:
    """Of act(x, y), x [4, 3, 2], y [4]."""
    x, y = torch.rand(4, 3, 2, requires_grad=True).add(0.1), torch.tensor([0, 2, 1, 1])
    following = BatchTracer(2, lambda code, detail="": None)
    following.look(True)
    following.begin([x, y], 4)
    if weighed:
        following.weigh()
    following.switch(True)
    try:
        return following.of(act(x, y))
    finally:
        following.switch(False)


@pytest.mark.parametrize(
    ("act", "dim", "inner", "outer"),
    [
        (lambda x, y: x.view(12, 2), 0, 3, 1),
        (lambda x, y: x.reshape(24), 0, 6, 1),
        (lambda x, y: x.transpose(0, 1).reshape(12, 2), 0, 1, 3),
        (lambda x, y: x.permute(2, 1, 0).contiguous().view(6, 4), 1, 1, 1),
        (lambda x, y: x.view(12, 2).view(4, 3, 2).sum(1), 0, 1, 1),
        (lambda x, y: torch.cat([x, x]), 0, 1, 2),
        (lambda x, y: torch.cat([x, 2 * x])[4:], 0, 1, 1),
        (lambda x, y: torch.stack([x, x]), 1, 1, 1),
        (lambda x, y: x.movedim(0, 2)[:, 0], 1, 1, 1),
        (lambda x, y: F.linear(x, torch.rand(5, 2)).softmax(1), 0, 1, 1),
        (lambda x, y: torch.bmm(x, x.transpose(1, 2)), 0, 1, 1),
        (lambda x, y: torch.rand(3, 7)[y], 0, 1, 1),
        (lambda x, y: F.layer_norm(x, (2,)), 0, 1, 1),
        (lambda x, y: F.conv1d(x, torch.rand(5, 3, 1)), 0, 1, 1),
        (lambda x, y: torch.cdist(x.view(4, 6), torch.rand(2, 6)), 0, 1, 1),
    ],
)
def test_samples_are_followed_through_shapes(act: Act, dim: int, inner: int, outer: int) -> None:
    trace = traced(act)
    assert trace is not None and not trace.met
    assert (trace.dim, trace.inner, trace.outer) == (dim, inner, outer)


@pytest.mark.parametrize(
    "act",
    [
        lambda x, y: x.sum((1, 2)).square().mean(),
        lambda x, y: F.cross_entropy(x.sum(2), y),
        lambda x, y: F.cross_entropy(x.sum(2), y, label_smoothing=0.1),
        lambda x, y: (x.mean() + 0.5 * x.square().mean()) / 3 - x.sum() / 24,
        lambda x, y: (x.square().sum((1, 2)) + x.mean()).mean(),
        lambda x, y: torch.stack([x.mean(), x.square().mean()]).sum(),
        lambda x, y: (x - x.mean(1, keepdim=True)).square().mean(),
        lambda x, y: x.sum() / torch.ones_like(y).sum(),
        lambda x, y: x.flip(0).square().mean(),
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), torch.rand(4, 3, 2)),
    ],
)
def test_means_over_samples_are_means(act: Act) -> None:
    trace = traced(act)
    assert trace is not None and trace.dim is None and not trace.met and not trace.undivided, trace


@pytest.mark.parametrize(
    ("act", "met"),
    [
        (lambda x, y: (x - x.mean(0)).square().mean(), "pow of a mean"),
        (lambda x, y: (x / x.std(0)).mean(), "std over the samples"),
        (lambda x, y: x.mean().sqrt(), "sqrt of a mean"),
        (lambda x, y: x.mean() * x.mean(), "product of a mean"),
        (lambda x, y: x.mean() / x.sum(), "quotient of a mean"),
        (lambda x, y: x.softmax(0).square().mean(), "softmax over the samples"),
        (lambda x, y: (x * x.flip(0)).mean(), "flip of the samples"),
        (lambda x, y: (x + x.roll(1, 0)).square().mean(), "roll of the samples"),
        (lambda x, y: (x * x[torch.tensor([1, 0, 3, 2])]).mean(), "a permutation of the samples"),
        (lambda x, y: (x.sum((1, 2))[:, None] - x.sum((1, 2))[None]).abs().mean(), "sub of pairs of samples"),
        (lambda x, y: x.view(4, 6) @ x.view(4, 6).T, "product of samples with each other"),
        (lambda x, y: x.cumsum(0).mean(), "cumsum over the samples"),
        (lambda x, y: x.amax((0, 2)), "amax over the samples"),
        (lambda x, y: (1.0 / torch.bincount(y))[y].mean(), "reciprocal of a count"),
        (lambda x, y: (torch.histc(y.float(), 3) * x.mean((0, 2))).sum(), "product of a count"),
        (lambda x, y: F.scaled_dot_product_attention(x.view(1, 4, 6), x.view(1, 4, 6), x.view(1, 4, 6)), "samples with each other"),
        (lambda x, y: F.batch_norm(x, None, None, training=True), "batch norm over the samples"),
        (lambda x, y: torch.where(x > x.mean(), x, 0 * x).mean(), "gt of a mean"),
        (lambda x, y: torch.cdist(x.view(4, 6), x.view(4, 6)).mean(), "product of samples with each other"),
        (lambda x, y: F.cross_entropy(x.sum(2), y, ignore_index=1), "2 of 4 targets count"),
        (lambda x, y: x.sum() / 8, "the samples of the global batch"),
    ],
)  # fmt: skip
def test_samples_that_meet_are_said(act: Act, met: str) -> None:
    trace = traced(act)
    assert trace is not None and met in trace.met, trace


@pytest.mark.parametrize(
    ("act", "undivided"),
    [
        (lambda x, y: x.sum(), "a sum over samples"),
        (lambda x, y: x.sum() / 3, "a sum divided by 3"),
        (lambda x, y: x.mean() + F.cross_entropy(x.sum(2), y, reduction="sum"), "a sum over samples"),
        (lambda x, y: (x.sum(0) * 0.25).sum(), ""),
        (lambda x, y: torch.stack([x.sum() / 12, x.mean()]).sum(), ""),
    ],
)
def test_a_sum_over_samples_is_a_mean_once_it_is_divided_by_them(act: Act, undivided: str) -> None:
    trace = traced(act)
    assert trace is not None and not trace.met and bool(trace.undivided) == bool(undivided)
    assert undivided in trace.undivided


def test_what_a_mean_goes_over_is_counted_by_sample() -> None:
    trace = traced(lambda x, y: x.mean() + F.cross_entropy(x.sum(2), y))
    assert trace is not None and trace.terms == (6.0, 1.0)


def test_a_count_that_the_script_has_said_is_a_constant() -> None:
    def masked(x: Tensor, y: Tensor) -> Tensor:
        return (x.sum((1, 2)) * (y > 0)).sum() / (y > 0).sum().clamp(min=1)

    plain, weighed = traced(masked), traced(masked, weighed=True)
    assert plain is not None and plain.met and weighed is not None and not weighed.met


def test_what_has_no_rule_leaves_no_trace() -> None:
    assert traced(lambda x, y: torch.nonzero(y)) is None
    assert traced(lambda x, y: x[y > 0]) is None
    assert traced(lambda x, y: torch.rand(4, 3)) is None
