"""Buckets: they can be dealt, and zeros stand for gradients that are not there."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.comm.bucket import Bucket

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def parameters(numels):
    return [nn.Parameter(torch.zeros(n)) for n in numels]


@given(sizes, st.integers(1, 5))
def test_a_bucket_can_be_dealt_and_its_body_is_gradients_alone(numels, multiple):
    bucket = Bucket(parameters(numels), multiple)
    assert bucket.flat.numel() % multiple == 0
    assert bucket.body.numel() == sum(numels) > bucket.flat.numel() - multiple


def test_zeros_travel_for_a_parameter_without_a_gradient_and_it_is_named():
    used, unused = parameters([3, 2])
    bucket = Bucket([used, unused])
    for value in (1.0, 2.0):  # the second step must not see what the first left behind
        used.grad, unused.grad = torch.full_like(used, value), None
        bucket.fill()
        assert bucket.flat.tolist() == [value] * 3 + [0.0] * 2
        assert len(bucket.absent) == 1 and bucket.absent[0] is unused
    used.grad, unused.grad = torch.ones_like(used), torch.ones_like(unused)
    bucket.fill()
    assert bucket.flat.tolist() == [1.0] * 5 and not bucket.absent
