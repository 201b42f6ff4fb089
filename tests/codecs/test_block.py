"""Stretches in turn cover everything; rows are those that weigh most in all replicas together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs import CODECS

SHAPES = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(SHAPES, st.floats(0.05, 1.0))
@settings(max_examples=40, deadline=None)
def test_in_so_many_steps_everything_is_sent_exactly_once(shapes, ratio) -> None:
    meeting = Meeting(f"block:ratio={ratio},dense=0", shapes)
    grads = [grad.abs() + 1 for grad in drawn(meeting.numel, 1, 2)]
    turns = CODECS.read(f"block:ratio={ratio},dense=0").turns
    assert turns == pytest.approx(1 / ratio, abs=1)
    total = sum(meeting.step(grads) for _ in range(turns))
    assert torch.allclose(total, grads[0] + grads[1], rtol=1e-15)
    sizes = [nbytes for ((_, nbytes),) in meeting.requests]
    assert max(sizes) - min(sizes) <= 8 * len(shapes)


def test_a_share_that_divides_one_takes_that_many_turns() -> None:
    for turns in range(1, 200):
        assert CODECS.read(f"block:ratio={1 / turns!r}").turns == turns


def test_the_rows_that_weigh_most_together_are_added_up() -> None:
    shapes = [(10, 6), (9,), (4, 3, 2), (0, 5)]
    meeting = Meeting("block:ratio=0.3,kind=rows,dense=0", shapes, replicas=3)
    grads = drawn(meeting.numel, 1, 2, 3)
    grads[0][6:12] = 100.0  # the second row: two replicas that are not alike
    grads[1][6:12] = -99.0
    total, whole = meeting.step(grads), sum(grads)
    weights = sum(grad[:60].view(10, 6).square().sum(1) for grad in grads)
    rows = weights.topk(3).indices
    assert 1 in rows
    want = torch.zeros(10, 6).double()
    want[rows] = whole[:60].view(10, 6)[rows]
    assert torch.allclose(total[:60], want.view(-1))
    assert torch.allclose(total[60:69], whole[60:69])  # a vector goes whole
    assert total[69:93].view(4, 6).abs().sum(1).count_nonzero() == 2
    assert [op for op, _ in meeting.requests[0]] == ["Sum", "Sum"]


@pytest.mark.parametrize("kind", ["cyclic", "rows"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_everybody(kind: str, bad: float) -> None:
    meeting = Meeting(f"block:ratio=0.05,kind={kind}", [(40, 30)], replicas=2)
    grads = drawn(meeting.numel, 1, 2)
    grads[1][333] = bad
    assert not meeting.step(grads).isfinite().all()
