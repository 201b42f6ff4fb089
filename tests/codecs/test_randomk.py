"""Elements by lot: the same on all replicas, each as likely as any other, unbiased where that is asked for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs._parcel import kept_of
from unisono_contrib.codecs import randomk

HERE = torch.device("cpu")


@given(st.integers(0, 2000), st.floats(0.001, 1.0), st.integers(0, 2**32 - 1))
def test_places_are_different_and_stretches_cover_all(numel: int, ratio: float, lot: int) -> None:
    kept = kept_of(numel, ratio)
    places, lengths = randomk.drawn(numel, kept, lot, HERE)
    assert len(places) == kept and lengths.sum() == numel
    ends = lengths.cumsum(0)
    assert bool((places < ends).all()) and bool((places >= ends - lengths).all())
    assert not kept or lengths.max() - lengths.min() <= 1


def test_its_mean_over_seeds_is_the_gradient() -> None:
    shapes, seeds, ratio = [(9, 7), (13,)], 2000, 0.2
    total = torch.zeros(76, dtype=torch.float64)
    grads = drawn(76, 1, 2)
    for seed in range(seeds):
        total += Meeting(f"randomk:ratio={ratio},unbiased=true,dense=0", shapes, seed=seed).step(grads)
    whole = grads[0] + grads[1]
    spread = whole.abs() * (5 / seeds) ** 0.5  # of the mean: each is drawn with a chance of about a fifth
    assert bool(((total / seeds - whole).abs() < 5 * spread).all())


def test_every_element_is_as_likely_as_any_other_of_its_stretch() -> None:
    hits, draws = torch.zeros(50), 3000
    for lot in range(draws):
        places, _ = randomk.drawn(50, 5, lot, HERE)
        hits[places] += 1
    assert bool(((hits - draws / 10).abs() < 5 * (draws * 0.09) ** 0.5).all())


def test_replicas_send_the_same_places_and_sums_are_exact_there() -> None:
    meeting = Meeting("randomk:ratio=0.1,dense=0", [(40, 30), (7,), (0, 2)], replicas=3, seed=5)
    seen = []
    for step in range(3):
        grads = drawn(meeting.numel, step, step + 10, step + 20)
        total = meeting.step(grads)
        there = total != 0
        assert there.sum() == 120 + 1
        assert torch.allclose(total[there], sum(grads)[there], rtol=1e-15, atol=1e-15)
        seen.append(there)
    assert not torch.equal(seen[0], seen[1])  # another lot each step
    assert meeting.requests[0] == [("Sum", (121 + 1) * 8)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_everybody(bad: float) -> None:
    meeting = Meeting("randomk:ratio=0.01", [(40, 30)], replicas=2)
    grads = drawn(meeting.numel, 1, 2)
    grads[1][333] = bad
    assert not meeting.step(grads).isfinite().all()
