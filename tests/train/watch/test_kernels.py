"""A step looked at operation by operation: which steps, what is counted, and that a profiler of the user's is left alone."""

import torch
from torch.autograd.profiler import profile

from unisono.train.watch.kernels import FIRST, KernelLook


def _looked(look: KernelLook, count: int, work: int = 10) -> list[int]:
    """The steps that were looked at."""
    x, seen = torch.ones(64), []
    for step in range(1, count + 1):
        with look.step():
            for _ in range(work):
                x = x * 1.0 + 0.5
        if look.take():
            seen.append(step)
    return seen


def test_ever_fewer_steps_are_looked_at_the_same_on_every_rank() -> None:
    assert _looked(KernelLook(True), 40) == [4, 8, 16, 32] == _looked(KernelLook(True), 40)
    assert _looked(KernelLook(False), 40) == []


def test_operations_are_counted_as_they_are_called() -> None:
    look, x = KernelLook(True), torch.ones(64)
    for _ in range(FIRST):
        with look.step():
            for _ in range(25):
                x = x * 1.0
    seen = look.take()
    assert seen["count"] == 25 and seen["small_count"] <= 25
    assert 0 < seen["small_s"] <= seen["inside_s"] < 1
    assert look.take() == {}


def test_what_python_does_between_two_operations_is_the_longest_gap() -> None:
    look, x = KernelLook(True), torch.ones(64)
    for _ in range(FIRST):
        with look.step():
            y = x.exp()
            sum(i * i for i in range(200_000))
            y.tanh()
    before, after, seconds = look.take()["gap"]
    assert (before, after) == ("aten::exp", "aten::tanh") and seconds > 0.001


def test_a_profiler_of_the_users_goes_on() -> None:
    look, x = KernelLook(True), torch.ones(64)
    with profile() as theirs:
        for _ in range(FIRST):
            with look.step():
                x = x + 1.0
    assert look.take() == {}
    assert sum(event.name == "aten::add" for event in theirs.function_events) == FIRST
