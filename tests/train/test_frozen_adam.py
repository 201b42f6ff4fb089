"""Adam with a second moment that learns in some steps only."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from unisono.spec.training import Optimiser, UpdateSizes
from unisono_contrib.train.optim._frozen import FrozenAdam
from unisono_contrib.train.optim.onebit_adam import OneBitAdam
from unisono_contrib.train.optim.zeroone_adam import ZeroOneAdam

LR = 0.05


def played(member: Optimiser, steps: int, rows: int = 4, late: int = 0):
    """(weight, state) before each step and at the end. The last row has no gradient in the first `late` steps."""
    generator = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.randn(rows, 3, generator=generator, dtype=torch.float64))
    live = member.bind([{"params": [weight], "weight_decay": 0.1}], LR, False)
    live.state[weight] = member.state(weight)
    seen = []
    for step in range(steps + 1):
        seen.append((weight.detach().clone(), {k: v.clone() for k, v in live.state[weight].items()}))
        weight.grad = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        weight.grad[-1] *= step >= late
        seen[-1][1]["grad"] = weight.grad.clone()
        live.step()
    return seen


def test_while_its_second_moment_learns_it_is_adamw() -> None:
    (weight, _), *_ = seen = played(OneBitAdam(variance_steps=9), 6)
    twin = nn.Parameter(weight.clone())
    live = torch.optim.AdamW([twin], lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for (weight, state), (then, _) in pairwise(seen):
        assert torch.allclose(weight, twin, rtol=1e-12)
        twin.grad = state["grad"]
        live.step()
        assert torch.allclose(then, twin, rtol=1e-12)


@pytest.mark.parametrize(
    ("member", "learns"),
    [
        (OneBitAdam(variance_steps=3), {0, 1, 2}),
        (ZeroOneAdam(refreshes=1), {0, 1, 3, 7}),
        (ZeroOneAdam(refreshes=2), {0, 1, 2, 4, 6, 10}),
    ],
)
def test_its_second_moment_moves_in_its_steps_and_stands_still_in_all_others(member, learns) -> None:
    seen = played(member, 13)
    moved = {
        step
        for step, ((_, a), (_, b)) in enumerate(pairwise(seen))
        if not torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
    }
    assert moved == learns
    assert all(not torch.equal(a, b) for (a, _), (b, _) in pairwise(seen))
    assert [member.whole_steps(step) for step in range(14)] == [
        sum(s < step for s in learns) for step in range(14)
    ]


@pytest.mark.parametrize("member", [OneBitAdam(variance_steps=2), ZeroOneAdam(refreshes=1)])
def test_its_law_says_what_it_does_in_every_step(member: FrozenAdam) -> None:
    seen = played(member, 9, late=5)
    for step, ((weight, state), (then, after)) in enumerate(pairwise(seen)):
        grad = state.pop("grad")
        law = member.law(UpdateSizes(LR, 0.1, step, 2.0**-48), weight, state, grad, torch.zeros_like(grad))
        for key, (value, error) in law.items():
            live = then if key == "param" else after[key].double()
            assert not ((live - value).abs() > error).any(), (step, key)


def test_a_row_that_comes_after_the_freeze_moves_no_further_than_adamw_would_have_it() -> None:
    member = OneBitAdam(variance_steps=2)
    seen = played(member, 6, late=4)
    moves = [(b - a * (1 - LR * 0.1))[-1] for (a, _), (b, _) in pairwise(seen)]
    assert not any(move.any() for move in moves[:4])
    assert all(0 < move.abs().max() <= LR * member.reach * (1 + 1e-12) for move in moves[4:])


def test_adamw_never_comes_as_far_as_the_reach() -> None:
    """Gradients that grow as they should to move an element as far as can be."""
    member = OneBitAdam(betas=(0.9, 0.95), variance_steps=400)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    live = torch.optim.AdamW([weight], lr=1.0, betas=member.betas, weight_decay=0.0)
    furthest = 0.0
    for step in range(300):
        before = weight.item()
        weight.grad = torch.tensor([(member.betas[1] / member.betas[0]) ** step], dtype=torch.float64)
        live.step()
        furthest = max(furthest, abs(weight.item() - before))
    assert 0.99 * member.reach < furthest <= member.reach
