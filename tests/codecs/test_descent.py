"""Descent on a quadratic of which each replica knows a part: error feedback brings every codec to the plain answer."""

import pytest
import torch

from tests.codecs.meeting import Meeting

ROWS, COLUMNS = 12, 20


def descended(text: str, steps: int = 300) -> float:
    """How far from the best weights of Σ |A w - b|² / 2 over two replicas descent ends, over how far it began. The two
    gradients add up to zero there, and neither is zero: so what is left of them stays as large as the last steps."""
    lot = torch.Generator().manual_seed(3)
    maps = [torch.randn(60, COLUMNS, generator=lot, dtype=torch.float64) / 6 for _ in range(2)]
    targets = [torch.randn(ROWS, 60, generator=lot, dtype=torch.float64) for _ in range(2)]
    square = sum(a.T @ a for a in maps)
    best = sum(b @ a for a, b in zip(maps, targets, strict=True)) @ torch.linalg.inv(square)
    member, plus, mark = text.partition("+")
    small = "" if member.startswith(("plain", "powersgd")) else ",dense=0"
    meeting = Meeting(f"{member}{small}{plus}{mark}", [(ROWS, COLUMNS)], replicas=2)
    weight = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for step in range(steps):
        grads = [((weight @ a.T - b) @ a).view(-1) for a, b in zip(maps, targets, strict=True)]
        weight -= 0.04 * (1 - step / steps) * meeting.step(grads).view(ROWS, COLUMNS)
    return ((weight - best).norm() / best.norm()).item()


@pytest.mark.parametrize(
    "text",
    [
        "topk:ratio=0.1+ef",
        "topk:ratio=0.1,kind=chunked+ef",
        "topk:ratio=0.1+ef21",
        "threshold:ratio=0.2,every=5+ef",
        "threshold:tau=0.3,ratio=0.3+ef",
        "randomk:ratio=0.25+ef",
        "block:ratio=0.1+ef",
        "block:ratio=0.2,kind=rows+ef",
        "powersgd:r=2+ef",
        "powersgd:r=2,start=5+ef",
        "ternary:clip=1+ef",
        "chunktopk:chunk=64,top=6+ef",
    ],
)
def test_error_feedback_brings_it_to_the_plain_answer(text: str) -> None:
    assert descended(text) < 0.02


@pytest.mark.parametrize("text", ["topk:ratio=0.1", "threshold:tau=0.3,ratio=0.3", "powersgd:r=2"])
def test_without_it_what_is_never_sent_is_missing(text: str) -> None:
    assert descended(text) > 2 * descended(f"{text}+ef")
