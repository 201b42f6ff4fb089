"""PowerSGD: exact where a matrix has the rank for it, else a projection; its guesses are alike everywhere."""

import pytest
import torch

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs.powersgd.live import orthonormal, unit


def of_rank(rank: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    left, right = drawn(rank * rows, seed)[0], drawn(rank * columns, seed + 1000)[0]
    return left.view(rows, rank) @ right.view(rank, columns)


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_sums_of_low_rank_come_whole_at_once(rank: int) -> None:
    """Of each replica half the rank, so that the sum has no more than four."""
    shapes = [(30, 20), (17,), (12, 8, 5), (2, 3)]
    meeting = Meeting("powersgd:r=4", shapes, replicas=2)
    for step in range(3):
        grads = []
        for place in range(2):
            mine = max(0, rank // 2 if place else rank - rank // 2)
            parts = [of_rank(mine, 30, 20, 100 * step + place).view(-1), *drawn(17, step + place)]
            parts += [of_rank(mine, 12, 40, 100 * step + place + 7).view(-1), *drawn(6, step + place)]
            grads.append(torch.cat(parts))
        total, whole = meeting.step(grads), grads[0] + grads[1]
        assert torch.allclose(total, whole, rtol=1e-9, atol=1e-9 * whole.abs().max().item())
    assert [[op for op, _ in step] for step in meeting.requests] == [["Sum", "Sum"]] * 3


def test_a_sum_of_any_rank_is_projected_and_the_guess_gets_better() -> None:
    meeting = Meeting("powersgd:r=2", [(40, 30)], replicas=3)
    fading = torch.linspace(0, 6, 30).neg().exp()
    grads = [grad.view(40, 30).mul(fading).view(-1) for grad in drawn(1200, 1, 2, 3)]
    whole = (grads[0] + grads[1] + grads[2]).view(40, 30)
    best = torch.linalg.svdvals(whole)[2:].square().sum().sqrt()
    errors = []
    for _ in range(12):
        total = meeting.step(grads).view(40, 30)
        errors.append(torch.linalg.matrix_norm(whole - total))
        assert torch.linalg.matrix_rank(total) == 2
        assert errors[-1] <= torch.linalg.matrix_norm(whole)
    assert errors[0] > 1.01 * best and errors[-1] < 1.0001 * best
    kept = [memory.alike[0]["q"] for memory in meeting.memories]
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])


def test_what_each_replica_decodes_adds_up_to_the_sum() -> None:
    meeting = Meeting("powersgd:r=3", [(20, 10), (5,), (7, 9)], replicas=3)
    total = meeting.step(drawn(meeting.numel, 1, 2, 3))
    assert torch.allclose(sum(meeting.decoded), total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nothing", [0.0, 1e-30])
def test_after_zeros_every_direction_is_open_again(nothing: float) -> None:
    meeting = Meeting("powersgd:r=4", [(30, 20)], replicas=2, dtype=torch.float32)
    for _ in range(3):
        total = meeting.step([nothing * grad.float() for grad in drawn(600, 1, 2)])
        assert total.isfinite().all()
    grads = [of_rank(2, 30, 20, seed).view(-1).float() for seed in (3, 4)]
    assert torch.allclose(meeting.step(grads), grads[0] + grads[1], atol=1e-4)


def test_before_the_first_step_that_is_compressed_gradients_go_as_they_are() -> None:
    meeting = Meeting("powersgd:r=1,start=2", [(20, 10)], replicas=2)
    grads = drawn(200, 1, 2)
    exact = [torch.equal(meeting.step(grads), grads[0] + grads[1]) for _ in range(4)]
    assert exact == [True, True, False, False]
    assert [len(step) for step in meeting.requests] == [1, 1, 2, 2]


def test_columns_are_orthonormal_whatever_they_come_from() -> None:
    for p in (
        drawn(120, 1)[0].view(30, 4),
        torch.zeros(30, 4),
        torch.ones(30, 4),
        of_rank(1, 30, 4, 2).float(),
    ):
        q = orthonormal(p)
        assert q.dtype == p.dtype
        assert torch.allclose(q.T @ q, torch.eye(4, dtype=p.dtype), atol=1e-5)
    before = torch.arange(8.0).view(2, 4)
    assert torch.equal(unit(torch.tensor([[0.0] * 4, [torch.inf] * 4]), before), before)
    assert torch.allclose(unit(torch.full((2, 4), 1e-25), before), torch.full((2, 4), 0.5))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_everybody(bad: float) -> None:
    meeting = Meeting("powersgd:r=2", [(40, 30), (5,)], replicas=2)
    grads = drawn(meeting.numel, 1, 2)
    grads[1][333] = bad
    assert not meeting.step(grads).isfinite().all()
