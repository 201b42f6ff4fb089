"""Local norms and sums in a smaller dtype are told by their numbers, and from what looks like them."""

import pytest
import torch
from torch.distributed.tensor import Shard

from unisono.library.gradient_check import judge

RANKS, MICROS = 2, 4


def shares():
    draws = torch.Generator().manual_seed(0)
    return [
        {n: torch.randn(s, generator=draws, dtype=torch.float64) for n, s in (("a", (8, 6)), ("b", (8,)))}
        for _ in range(RANKS * MICROS)
    ]


def right():
    parts = shares()
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def pieces():
    return [{name: x.chunk(2)[rank].clone() for name, x in right().items()} for rank in range(RANKS)]


def norm(gradients):
    return torch.stack([x.norm() for x in gradients.values()]).norm()


def clipped(gradients, by):
    return {name: x / by for name, x in gradients.items()}


def judged(seen, want):
    return judge([want], seen, {"*": Shard(0)}, RANKS, 64)


def test_pieces_clipped_by_their_own_norms_are_told_from_other_factors():
    want = clipped(right(), norm(right()))
    assert judged([clipped(piece, norm(right())) for piece in pieces()], want).passed
    local = judged([clipped(piece, norm(piece)) for piece in pieces()], want)
    assert local.cause == "partial_norm" and "each is clipped by its own norm" in local.explanation
    other = judged([clipped(piece, norm(piece) * (1 + 0.1 * r)) for r, piece in enumerate(pieces())], want)
    assert not other.passed and other.cause != "partial_norm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_in_a_smaller_dtype_is_named(dtype):
    parts = shares()
    rows = [parts[r * MICROS : (r + 1) * MICROS] for r in range(RANKS)]
    got = {}
    for name in parts[0]:
        sums = []
        for row in rows:
            total = torch.zeros_like(row[0][name], dtype=dtype)
            for part in row:
                total += part[name].to(dtype)
            sums.append(total.double())
        got[name] = sum(sums)
    verdict = judge(parts, [got] * RANKS, {}, RANKS, 64)
    assert verdict.cause == "precision_lost" and str(dtype).removeprefix("torch.") in verdict.explanation, (
        verdict
    )


def test_a_small_error_in_one_direction_is_no_rounding():
    got = {name: x * 1.001 for name, x in right().items()}
    assert judge(shares(), [got] * RANKS, {}, RANKS, 64).cause == "factor"
    noise = {name: x + 1e-3 * x.abs().max() * torch.ones_like(x) for name, x in right().items()}
    assert judge(shares(), [noise] * RANKS, {}, RANKS, 64).cause == "gradient"
