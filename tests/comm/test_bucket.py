"""Buckets: every gradient travels exactly once, in an order that arrival cannot change."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.comm.bucket import Bucket, Buckets, deal

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def parameters(numels):
    return [nn.Parameter(torch.zeros(n)) for n in numels]


@given(sizes, st.integers(4, 400))
def test_deal_keeps_every_parameter_once_and_in_reverse(numels, cap):
    params = parameters(numels)
    runs = deal(params, cap)
    flat = [p for run in runs for p in run]
    assert [id(p) for p in flat] == [id(p) for p in reversed(params)]
    assert all(len(run) == 1 or sum(p.nbytes for p in run) <= cap for run in runs)


def test_runs_are_of_one_dtype():
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    assert [len(run) for run in deal(params)] == [1, 1]


@settings(deadline=None)
@given(sizes, st.permutations(range(12)), st.integers(1, 3))
def test_departure_order_is_fixed_and_sums_are_right(numels, arrival, micros):
    params = parameters(numels)
    buckets = Buckets(params, tail=2)
    left = []
    for micro in range(micros):
        if micro == micros - 1:
            buckets.arm(lambda b: left.append(b))
        for i in arrival:
            if i < len(params):
                (params[i] * float(i + 1)).sum().backward()
    buckets.finish()
    assert left == buckets.early
    for bucket in left:
        for p, view in zip(bucket.params, bucket.views, strict=True):
            place = next(i for i, q in enumerate(params) if q is p)
            assert p.grad is view
            assert torch.equal(view, torch.full_like(p, float(place + 1) * micros))
    assert buckets.tail is not None and buckets.tail.numel() == 2


def test_an_unused_parameter_counts_as_zero_and_holds_nobody_up():
    used, unused = parameters([3, 2])
    buckets = Buckets([used, unused])
    left = []
    for _ in range(2):  # the second step must not see what the first left behind
        buckets.arm(left.append)
        used.sum().backward()
        buckets.finish()
        assert unused.grad is not None and not unused.grad.any()
        used.grad = unused.grad = None
    assert len(left) == 2


def test_body_leaves_the_tail_out():
    (p,) = parameters([4])
    bucket = Bucket([p], tail=2)
    assert bucket.body.numel() == 4 and bucket.flat.numel() == 6


@given(st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_gradients_that_leave_late_move_into_the_buffer_while_backward_goes_on(micros, in_between):
    early, late = parameters([100_000, 100_000]), parameters([3])
    buckets = Buckets(early, [late])
    assert not buckets.early  # the run joined the late group
    (bucket,) = buckets.late[-1]
    for micro in range(micros):
        if micro == micros - 1:
            buckets.arm(lambda b: None)
        for i, p in enumerate(early):
            (p * float(i + 1)).sum().backward()
        late[0].sum().backward()
        if in_between:  # as a tied weight's two halves are added
            torch._foreach_add_([p.grad for p in late if p.grad is not None], 1.0)
    moved = [p.grad is view for p, view in zip(bucket.params, bucket.views, strict=True)]
    buckets.finish()
    bucket.fill()
    assert any(moved)
    want = {100_000: {1.0 * micros, 2.0 * micros}, 3: {micros * (2.0 if in_between else 1.0)}}
    for p, view in zip(bucket.params, bucket.views, strict=True):
        assert p.grad is view
        (value,) = set(view.tolist())
        assert value in want[p.numel()]


def test_in_every_step_gradients_of_earlier_micro_batches_add_up_in_the_buffer():
    params = parameters([3, 5, 40])
    buckets = Buckets(params)
    for _ in range(3):
        for p in params:
            p.grad = None
        for micro in range(3):
            if micro == 2:
                buckets.arm(lambda bucket: None)
            sum(p.sum() for p in params).backward()
            assert all(
                p.grad is view
                for bucket in buckets.early
                for p, view in zip(bucket.params, bucket.views, strict=True)
            )
        buckets.finish()
        assert all(bool((bucket.flat == 3.0).all()) for bucket in buckets.early)


def test_a_backward_that_keeps_its_graph_leaves_none_in_the_buffer():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(100_000))]
    buckets = Buckets(params[:1], [params[1:]])
    buckets.arm(lambda bucket: None)
    sum((p**2).sum() for p in params).backward(create_graph=True)
    buckets.finish()
    everything = [*buckets.early, *(bucket for group in buckets.late for bucket in group)]
    for bucket in everything:
        bucket.fill()
        assert not bucket.flat.requires_grad and bucket.flat.grad_fn is None
        assert bool((bucket.flat == 2.0).all())
