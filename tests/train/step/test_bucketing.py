"""Gradients leave exactly once a step, in an order that arrival cannot change, and while backward goes on."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.comm.group import Done
from unisono.observe.span import Recorder
from unisono.parallel.params import Slot
from unisono.parallel.player import BackwardCall
from unisono.parallel.ties import Tie
from unisono.sync import Sync, Verdict
from unisono.train.step.bucketing import deal
from unisono.train.step.gradients import Gradients

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


class Mirror:
    """A group of two, of which the other does as this one does."""

    size, index = 2, 0
    recorder = Recorder()

    def near(self, device):
        return False

    def buffer(self, numel, like):
        return torch.zeros(numel, dtype=like.dtype)

    def start_all_gather(self, out, part):
        out.copy_(part.repeat(2))
        return Done()

    def all_reduce(self, x):
        return x.mul_(2)


class Noting(Sync):
    """A policy that notes which buckets it was given."""

    def __init__(self):
        self.left = []

    def weigh(self, count):
        return 1.0

    def grad_ready(self, bucket):
        self.left.append(bucket)

    def settle(self):
        return Verdict.APPLY

    def after_update(self, step):
        pass


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


def made(params, alias_of=None):
    """Gradients of these parameters; alias_of: the second of them is a second use of the first."""
    slots = [
        Slot(f"p{i}", p, p, tuple(p.shape), (0,), alias=alias_of is not None and i == 1)
        for i, p in enumerate(params)
    ]
    ties = (Tie((slots[0], slots[1]), Mirror()),) if alias_of is not None else ()
    sync = Noting()
    return Gradients(slots, Mirror(), sync, ties=ties), sync


@settings(deadline=None)
@given(sizes, st.permutations(range(12)), st.integers(1, 3))
def test_the_order_of_departure_is_fixed_and_sums_are_right(numels, arrival, micros):
    params = parameters(numels)
    gradients, sync = made(params)
    for _ in range(2):
        sync.left.clear()
        for micro in range(micros):
            gradients.begin(BackwardCall(0, micro, False, micro == micros - 1))
            for i in arrival:
                if i < len(params):
                    (params[i] * float(i + 1)).sum().backward()
        gradients.close()
        travelled = [p for bucket in sync.left for p in bucket.params]
        assert [id(p) for p in travelled] == [id(p) for p in reversed(params)]
        for bucket in sync.left:
            for p, view in zip(bucket.params, bucket.views, strict=True):
                place = next(i for i, q in enumerate(params) if q is p)
                assert p.grad is view
                assert torch.equal(view, torch.full_like(p, float(place + 1) * micros))
        gradients.forget()


@settings(deadline=None)
@given(sizes, st.integers(4, 100))
def test_buckets_are_no_larger_than_the_policy_says(numels, cap):
    slots = [Slot(f"p{i}", p, p, tuple(p.shape), (0,)) for i, p in enumerate(parameters(numels))]
    sync = Noting()
    sync.cap = cap
    gradients = Gradients(slots, Mirror(), sync)
    gradients.arm()
    sum(slot.live.sum() for slot in slots).backward()
    gradients.close()
    assert sum(len(bucket.params) for bucket in sync.left) == len(slots)
    assert all(len(bucket.params) == 1 or bucket.body.nbytes <= cap for bucket in sync.left)


def test_an_unused_parameter_holds_nobody_up_and_keeps_no_gradient():
    used, unused = parameters([3, 2])
    gradients, sync = made([used, unused])
    for step in range(2):
        gradients.arm()
        used.sum().backward()
        gradients.close()
        gradients.drop_unused()
        assert len(sync.left) == step + 1
        assert used.grad is not None and unused.grad is None
        assert gradients.unused == ("p1",)
        gradients.forget()
    gradients.arm()
    (used.sum() + unused.sum()).backward()
    gradients.close()
    assert gradients.unused == () and unused.grad is not None


@given(st.integers(1, 3))
@settings(deadline=None)
def test_gradients_that_leave_late_move_into_the_buffer_while_backward_goes_on(micros):
    owner, alias, *rest = params = parameters([3, 3, 100_000, 100_000])
    gradients, sync = made(params, alias_of=0)
    moved = []
    for micro in range(micros):
        gradients.begin(BackwardCall(0, micro, False, micro == micros - 1))
        for i, p in enumerate(rest):
            (p * float(i + 1)).sum().backward()
        moved = [p.grad.data_ptr() for p in rest]
        (owner.sum() + 2 * alias.sum()).backward()
    gradients.close()
    (bucket,) = sync.left
    assert not any(p is alias for p in bucket.params)
    places = {view.data_ptr() for view in bucket.views}
    assert set(moved) <= places
    assert set(owner.grad.tolist()) == {3.0 * micros} == set(alias.grad.tolist())
    assert [set(p.grad.tolist()) for p in rest] == [{1.0 * micros}, {2.0 * micros}]


def test_a_backward_that_keeps_its_graph_leaves_none_in_the_buffer():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(100_000))]
    gradients, sync = made(params, alias_of=0)
    gradients.arm()
    sum((p**2).sum() for p in params).backward(create_graph=True)
    with torch.no_grad():
        gradients.close()
    for bucket in sync.left:
        assert not bucket.flat.requires_grad and bucket.flat.grad_fn is None
