"""What codecs draw is drawn anew in each step, and by each replica on its own: errors of many draws cancel."""

import pytest
import torch

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs._noise import SHIFTS, lot

STEPS = 1000


@pytest.mark.parametrize(
    "apart", [(("a", 0), ("a", 1)), (("a", 0), ("b", 0)), (("a", 0, 0), ("a", 0, 1))], ids=str
)
def test_what_two_draw_is_as_far_apart_in_no_two_steps(apart) -> None:
    """Independent places meet at one distance again as often as birthdays do: 7 times in 1000 steps."""
    one, other = ([lot(step, *who) % SHIFTS for step in range(STEPS)] for who in apart)
    for distances in ({(a - b) % SHIFTS for a, b in zip(one, other, strict=True)}, {*one}, {*other}):
        assert len(distances) > STEPS - 30
    assert len({a ^ b for a, b in zip(one, other, strict=True)}) > STEPS - 30


@pytest.mark.parametrize("text", ["qsgd:levels=7,dense=0", "ternary"])
def test_the_mean_of_many_sums_is_off_by_one_standard_error(text: str) -> None:
    steps, meeting = 300, Meeting(text, [(32, 16), (8,), (16, 32)])
    grads = [x.clamp(-1.0, 1.0) for x in drawn(meeting.numel, 1, 2)]  # ternary clips what is far off
    sums = torch.stack([meeting.step(grads) for _ in range(steps)])
    spread = sums.std(0)
    off = ((sums.mean(0) - sum(grads)) * steps**0.5 / spread)[spread > 0]
    assert len(off) > 0.8 * meeting.numel
    assert abs(off.square().mean().sqrt() - 1.0) < 0.08 and abs(off.mean()) < 0.1


@pytest.mark.parametrize("text", ["qsgd:levels=7,dense=0", "ternary"])
def test_replicas_with_one_gradient_make_errors_of_their_own(text: str) -> None:
    meeting = Meeting(text, [(32, 16), (8,), (16, 32)])
    (grad,) = drawn(meeting.numel, 3)
    errors = []
    for _ in range(4):
        meeting.step([grad, grad])
        errors.append(torch.stack(meeting.decoded) - grad)
    one, other = torch.cat(errors, 1)
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.2
