"""Thresholds: no element above one is left behind while there is room; payloads have one length; replicas agree."""

import pytest
import torch

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs import CODECS
from unisono_contrib.codecs.threshold import Threshold

SHAPES = [(60, 50), (11,), (0, 3)]


def test_elements_above_the_threshold_are_sent_and_no_others() -> None:
    meeting = Meeting("threshold:tau=1.5,ratio=0.5,dense=0", SHAPES, replicas=3)
    grads = drawn(meeting.numel, 1, 2, 3)
    above = torch.stack([torch.where(g.abs() > 1.5, g, 0.0) for g in grads])
    assert torch.equal(meeting.step(grads), above.sum(0))


def test_where_there_is_no_room_the_largest_go() -> None:
    meeting = Meeting("threshold:tau=0.001,ratio=0.1", [(50, 20)], replicas=1)
    (grad,) = drawn(meeting.numel, 4)
    least = grad.abs().topk(100).values.min()
    assert torch.equal(meeting.step([grad]), torch.where(grad.abs() >= least, grad, 0.0))


@pytest.mark.parametrize("values", ["plain", "bf16"])
def test_norms_and_biases_are_added_up_beside_the_gather_without_places(values: str) -> None:
    text = f"threshold:ratio=0.05,every=2,values={values}"
    meeting = Meeting(text, [(300,), (3, 5), (50, 20)], replicas=3, dtype=torch.float32)
    for step in range(3):
        grads = [x.float() for x in drawn(meeting.numel, 3 * step, 3 * step + 1, 3 * step + 2)]
        total, whole = meeting.step(grads), torch.stack(grads).sum(0)
        assert torch.equal(total[:315], whole[:315]) and not torch.equal(total[315:], whole[315:])
        torch.testing.assert_close(torch.stack(meeting.decoded).sum(0), total)
    member = CODECS.read(text)
    assert isinstance(member, Threshold)
    gathered = member.parcel([(50, 20)], 4)
    assert dict(meeting.requests[1]) == {"Gather": gathered.nbytes, "Sum": 4 * 315}
    alone = Meeting(text, [(300,), (3, 5)])
    own = drawn(315, 1, 2)
    assert torch.equal(alone.step(own), own[0] + own[1]) and alone.requests == [[("Sum", 8 * 315)]]


def test_it_is_told_anew_after_so_many_steps_and_kept_alike() -> None:
    meeting = Meeting("threshold:ratio=0.1,every=3,dense=0", SHAPES, replicas=2)
    taus = []
    for step in range(7):
        meeting.step([grad * (step + 1) for grad in drawn(meeting.numel, 2 * step, 2 * step + 1)])
        told = [[kept["tau"].item() for kept in memory.alike if kept] for memory in meeting.memories]
        assert told[0] == told[1]
        taus.append(told[0])
    assert taus[0] == taus[1] == taus[2] != taus[3] == taus[4] == taus[5] != taus[6]
    assert [[op for op, _ in step] for step in meeting.requests] == [
        ["Sum", "Gather"] if step % 3 == 0 else ["Gather"] for step in range(7)
    ]
    assert len({step[-1] for step in meeting.requests}) == 1  # one length, whatever was above


def test_about_half_of_the_places_are_taken() -> None:
    meeting = Meeting("threshold:ratio=0.02", [(500, 400)], replicas=2)
    meeting.step(drawn(meeting.numel, 1, 2))
    for sent in meeting.decoded:
        assert 0.008 < sent.count_nonzero().item() / sent.numel() < 0.012


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_everybody(bad: float) -> None:
    meeting = Meeting("threshold:ratio=0.01", SHAPES, replicas=2)
    grads = drawn(meeting.numel, 1, 2)
    for step in range(3):  # the first one tells a threshold from it
        grads[1][700 + step] = bad
        assert not meeting.step(grads)[700 + step].isfinite()
