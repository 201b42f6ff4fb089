"""Experts: equal to a loop over them, with no token that depends on another leaf's, and alike in load if asked."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.models.build import build
from unisono.models.init import initialise
from unisono.models.moe import MoEConfig
from unisono.models.moe.net import MoE, SparseLayer
from unisono.models.moe.routing import PARTS, places
from unisono.models.noise import Noise
from unisono.planner.work.transformer import transformer
from unisono.spec.model import Facts

SIZES: dict[str, Any] = {
    "n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "vocab": 31, "n_experts": 4, "d_expert": 12,
}  # fmt: skip


def model(**keys: Any) -> MoE:
    made = build(MoEConfig(**(SIZES | keys)), Facts(), device="cpu").double()
    initialise(made, 0)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return made  # type: ignore[return-value]


def layer(**keys: Any) -> SparseLayer:
    return model(**keys).blocks[0].mlp  # type: ignore[return-value]


def looped(sparse: SparseLayer, x: Tensor) -> Tensor:
    """Every expert on every token, weighed by what the router says."""
    own, E, D = sparse.experts, len(sparse.experts.up), x.shape[-1]
    chance = (x @ sparse.router.weight.T).softmax(-1)
    best, at = chance.topk(sparse.router.config.top_k)
    weight = torch.zeros_like(chance).scatter(-1, at, best / best.sum(-1, keepdim=True))
    y = torch.zeros_like(x)
    for e in range(E):
        hidden = F.gelu(x @ own.up[e].T + own.up_bias.view(E, -1)[e])
        y = y + weight[..., e : e + 1] * (hidden @ own.down[e].T + own.down_bias.view(E, D)[e])
    return y


@pytest.mark.parametrize("top_k", [2, 3])
def test_without_a_limit_it_is_a_loop_over_experts(top_k: int) -> None:
    sparse = layer(top_k=top_k)
    x = torch.randn(3, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted, got = looped(sparse, x), sparse(x, None)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    wished = torch.autograd.grad(wanted.square().sum(), list(sparse.parameters()))
    had = torch.autograd.grad(got.square().sum(), list(sparse.parameters()))
    for a, b in zip(had, wished, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_an_expert_without_a_token_has_a_gradient_of_zeros() -> None:
    sparse = layer(router="switch", top_k=1, bias_rate=1.0)
    sparse.router.votes[2:] = -100  # nobody goes there
    sparse(torch.randn(2, 8, 16, dtype=torch.float64), None).sum().backward()
    grads = [p.grad for p in sparse.experts.parameters() if p.dim() == 3]
    assert all(g is not None and not g[2:].any() and g[:2].any() for g in grads)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_places_count_first_choices_first_and_then_tokens(experts: int, top_k: int, seed: int) -> None:
    choice = torch.randint(experts, (2, 3, top_k), generator=torch.Generator().manual_seed(seed))
    place, seen = places(choice, experts), [0] * experts
    for k in range(top_k):
        for b in range(2):
            for t in range(3):
                expert = int(choice[b, t, k])
                assert place[b, t, k] == seen[expert]
                seen[expert] += 1


def test_room_is_kept_by_dropping_the_last() -> None:
    sparse = layer(capacity_factor=0.5)
    choice = sparse.router(torch.randn(3, 8, 16, dtype=torch.float64), Noise(0, torch.arange(3), 1.0))
    room = 0.5 * 3 * 8 * 2 / 4
    kept = torch.bincount(choice.expert[choice.kept], minlength=4)
    load = sparse.router.loads[0]
    assert kept.max() <= room and torch.equal(kept.double(), load[:4].clamp(max=room))
    assert load[-PARTS:-1].tolist() == [24, 48, 48 - kept.sum()]


def test_experts_that_choose_have_equally_many_tokens() -> None:
    choice = layer(router="expert_choice").router(torch.randn(3, 8, 16, dtype=torch.float64), None)
    assert torch.bincount(choice.expert[choice.kept], minlength=4).tolist() == [12] * 4


def test_losses_for_balance_are_those_of_the_papers_and_add_gradients_alone() -> None:
    keys = {"aux_loss": 0.1, "z_loss": 0.01}
    with_them, without = layer(**keys), layer()
    without.load_state_dict(with_them.state_dict())
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    weight, tokens = 0.25, 16
    y, plain = with_them(x, Noise(0, torch.arange(2), weight)), without(x, None)
    assert torch.equal(y, plain)
    z = x @ without.router.weight.T
    share = F.one_hot(z.topk(2).indices, 4).sum((0, 1, 2)) / (2 * tokens)
    aux = 0.1 * 4 * (share * z.softmax(-1).mean((0, 1))).sum() + 0.01 * z.logsumexp(-1).square().mean()
    (plain.sum() + weight * tokens * aux).backward()
    y.sum().backward()
    for got, wanted in zip(with_them.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-11, atol=1e-12)


def test_votes_move_tokens_away_from_the_busiest() -> None:
    router = layer(bias_rate=0.01).router
    router.vote(torch.tensor([5.0, 3.0, 4.0, 4.0], dtype=torch.float64))
    assert router.votes.tolist() == [-1, 1, 0, 0]


@pytest.mark.parametrize(
    "keys", [{}, {"activation": "swiglu", "bias": False}, {"n_shared_experts": 2, "moe_every": 2}]
)
def test_prices_count_the_parameters_that_are_there(keys: dict[str, Any]) -> None:
    made = model(**keys)
    workload = transformer(made.config, 31).workload
    assert sum(p.numel() for p in made.parameters()) == workload.parameters
