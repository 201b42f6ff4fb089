"""Ternary: one size a parameter for all replicas, the right mean, sums of codes that are rounded no second time."""

import pytest
import torch

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs import CODECS

pytestmark = pytest.mark.timeout(60)


def size(x: torch.Tensor, clip: float = 2.5) -> float:
    return min(x.abs().max().item(), clip * x.square().mean().sqrt().item())


@pytest.mark.parametrize("replicas", [1, 2, 7, 8, 130])  # sums in 2, 4, 4, 8 and 16 bits
def test_a_sum_is_a_whole_number_of_sizes_that_replicas_share(replicas: int) -> None:
    meeting = Meeting("ternary", [(16, 20)], replicas)
    grads = [(i + 1) * x for i, x in enumerate(drawn(320, *range(replicas)))]
    total = meeting.step(grads)
    share = max(map(size, grads))
    counts = total / share
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-4)
    assert counts.abs().max() <= replicas and counts.count_nonzero()
    # What each said that it sent adds up to the sum, without an error of its own.
    torch.testing.assert_close(sum(meeting.decoded), total, rtol=1e-6, atol=1e-9)
    assert all(len(set((x / share).round().tolist())) <= 3 for x in meeting.decoded)


def test_its_mean_over_the_draws_is_the_gradient_but_for_what_is_clipped() -> None:
    grads = drawn(1024, 3, 4)
    steps, share = 400, max(map(size, grads))
    meeting = Meeting("ternary", [(32, 32)])
    mean = sum(meeting.step(grads) for _ in range(steps)) / steps
    right = sum(x.clamp(-share, share) for x in grads)
    off = (mean - right) * steps**0.5 / share  # each draw is off by at most one size, mostly by less
    assert off.square().mean().sqrt() < 1.0 and off.abs().max() < 5.0 and off.mean().abs() < 0.1


def test_draws_differ_by_step_replica_and_name_and_not_by_bucket() -> None:
    a, b = drawn(512, 5, 6)
    alone, two = Meeting("ternary", [(16, 32)], 1), Meeting("ternary", [(16, 32), (16, 32)], 1)
    first, both = alone.step([a]), two.step([torch.cat([a, a])])
    assert torch.equal(both[:512], first) and not torch.equal(both[512:], first)
    assert not torch.equal(alone.step([a]), first)
    three = Meeting("ternary", [(16, 32)], 2)
    three.step([b, b])
    assert not torch.equal(*three.decoded)


def test_what_is_not_finite_reaches_its_parameter_and_no_other() -> None:
    for wrong in (torch.inf, -torch.inf, torch.nan):
        grads = drawn(1024, 1, 2)
        grads[1][7] = wrong
        total = Meeting("ternary", [(16, 32), (16, 32)]).step(grads)
        assert total[:512].isnan().all() and total[512:].isfinite().all()


def test_zeros_beside_others_stay_zeros() -> None:
    grads = [torch.cat([torch.zeros(512, dtype=x.dtype), x]) for x in drawn(512, 1, 2)]
    total = Meeting("ternary", [(16, 32), (16, 32)]).step(grads)
    assert not total[:512].any() and total[512:].any()


def test_it_sends_less_than_bytes_on_an_all_reduce_would() -> None:
    shapes = [(512, 512)]
    for dp in (2, 4, 8, 64):
        sent = CODECS.read("ternary").work(shapes, 4, dp).sent
        assert sent < 2 * (dp - 1) / dp * 512 * 512
    assert CODECS.read("ternary").work(shapes, 4, 2).sent < 0.1 * CODECS.read("plain").work(shapes, 4, 2).sent
