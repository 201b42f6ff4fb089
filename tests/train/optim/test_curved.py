"""Shampoo and SOAP against their identities, a library, their laws, and one device."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.small import recipe, started
from unisono.config import resolve
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.training import Optimiser, UpdateSizes
from unisono.train.optim.adamw import AdamW
from unisono.train.state.run_state import pieces_of
from unisono.train.step.train_step import train_step
from unisono_contrib.train.optim._curved_steps import (
    CurvedSteps,
    basis_within,
    inverse_root,
    inverse_root_within,
)
from unisono_contrib.train.optim.shampoo import Shampoo
from unisono_contrib.train.optim.soap import Soap


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stepped(member: Optimiser, steps: int = 4, lr: float = 0.05, decay: float = 0.1) -> torch.Tensor:
    weight = nn.Parameter(randn(6, 4))
    live = member.bind([{"params": [weight], "weight_decay": decay}], lr, False)
    live.state[weight] = member.state(weight)
    for step in range(steps):
        weight.grad = randn(6, 4, seed=step + 1)
        live.step()
    return weight.detach()


def test_shampoo_of_power_zero_is_gradient_descent() -> None:
    want = randn(6, 4)
    for step in range(4):
        want = want * (1 - 0.05 * 0.1) - 0.05 * randn(6, 4, seed=step + 1)
    ours = stepped(Shampoo(shampoo_power=0.0, shampoo_momentum=0.0, shampoo_rms=False))
    assert torch.allclose(ours, want, rtol=0, atol=1e-12)


def test_soap_whose_bases_are_rows_and_columns_is_adamw() -> None:
    assert torch.allclose(stepped(Soap(curvature_edge=0)), stepped(AdamW()), rtol=0, atol=1e-12)
    assert not torch.allclose(stepped(Soap()), stepped(AdamW()), rtol=1e-3)


def test_shampoo_s_root_is_that_of_the_library() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = (nn.Parameter(randn(5, 5)) for _ in range(2))
    member = Shampoo(shampoo_momentum=0.0, shampoo_rms=False, shampoo_damping=1e-14, curvature_interval=1)
    live = member.bind([{"params": [ours], "weight_decay": 0.0}], 0.05, False)
    other = library.Shampoo([theirs], lr=0.05, momentum=0.0, matrix_eps=1e-14)
    other.preconditioning_compute_steps = 1
    grad = randn(5, 5, seed=1)
    ours.grad, theirs.grad = grad.clone(), grad.clone()
    live.step()
    other.step()
    # The library adds products up; here they are a mean, the first of them a twentieth, so both roots are larger.
    assert torch.allclose((ours - randn(5, 5)) * math.sqrt(0.05), theirs - randn(5, 5), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "member",
    [Shampoo(), Shampoo(shampoo_rms=False, curvature_interval=2), Soap(), Soap(curvature_interval=2)],
)
def test_a_law_holds_the_steps_in_float32(member: Optimiser) -> None:
    weight = nn.Parameter(randn(12, 8).float())
    live = member.bind([{"params": [weight], "weight_decay": 0.1}], 0.05, False)
    live.state[weight] = member.state(weight)
    for step in range(5):
        before = weight.detach().double()
        held = {key: value.double().clone() for key, value in live.state[weight].items()}
        weight.grad = randn(12, 8, seed=step + 1).float()
        live.step()
        sizes = UpdateSizes(0.05, 0.1, step, 16 * 2.0**-24)
        law = member.law(sizes, before, held, weight.grad.double(), torch.zeros(12, 8, dtype=torch.float64))
        assert set(law) == {*held, "param"}
        for key, (value, error) in law.items():
            seen = weight if key == "param" else live.state[weight][key]
            assert bool(((seen.double() - value).abs() <= error).all()), (step, key)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3])
def test_errors_pass_no_further_than_their_bounds(size: float) -> None:
    half = randn(6, 3)
    x, noise = half @ half.T, randn(6, 3, seed=2) * size
    y = (half + noise) @ (half + noise).T
    root, off = inverse_root_within(x, (y - x).abs(), 0.25, 1e-3, 2.0**-48)
    assert float((inverse_root(y, 0.25, 1e-3) - root).norm()) <= off
    vectors, turned = basis_within(x, (y - x).abs(), 2.0**-48)
    assert bool(((basis_within(y, (y - x).abs(), 2.0**-48)[0] - vectors).abs() <= turned).all())


def outcome(
    ctx: Any, told: Any, plan: str
) -> tuple[dict[str, tuple[torch.Tensor, tuple[int, ...]]], int, set[str]]:
    """This rank's weights after three steps, how many directions it computed, and names of whole states it saves."""
    run, feed, _ = started(ctx, told, plan)
    (live,) = [part for part in run.update.optimizer.parts if isinstance(part, CurvedSteps)]  # type: ignore[attr-defined]
    inner, calls = live.direction, []

    def direction(*args: Any) -> torch.Tensor:
        calls.append(1)
        return inner(*args)

    live.direction = direction  # type: ignore[method-assign]
    for step in range(3):
        train_step(run, feed.fetch(step, run.leaves))
    weights = {slot.name: (slot.master.detach().clone(), slot.start) for slot in run.local.slots}
    return (
        weights,
        len(calls),
        {box.name for box in pieces_of(run) if box.saved and box.name.endswith("/left")},
    )


PLANS = [
    "dp=2 micros=2",
    "shard=2 zero=1",
    "shard=2",
    "tp=2",
    "pp=2 micros=4",
    "shard=2 tp=2",
    "dp=2 shard=2 zero=2",
]


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_any_way_to_spread_a_model_makes_the_steps_of_one_device(threads, tmp_path, name: str) -> None:
    told = recipe(tmp_path, optimizer=name, clip=1.0, curvature_interval=2)
    ((alone, count, states),) = threads(lambda ctx: outcome(ctx, told, "dp=1 precision=fp64"), 1)
    assert count == 3 * 8 and len(states) == 8
    for plan in PLANS:
        ranks = threads(
            lambda ctx, plan=plan: outcome(ctx, told, f"{plan} precision=fp64"), Plan.parse(plan).world
        )
        assert sum(rank[1] for rank in ranks) == count, plan
        assert sorted(name for rank in ranks for name in rank[2]) == sorted(states), plan
        for weights, _, _ in ranks:
            for key, (x, start) in weights.items():
                whole = alone[key][0][tuple(slice(a, a + n) for a, n in zip(start, x.shape, strict=True))]
                assert torch.allclose(x, whole, rtol=1e-6, atol=1e-8), (plan, key)


def test_state_that_lies_with_owners_is_not_offloaded(tmp_path) -> None:
    told = recipe(tmp_path, optimizer="soap", dtype="float32")
    with pytest.raises((ConfigProblems, UsageError), match="state lies with owners"):
        resolve(told, "dp=2 offload=optimizer", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [0.25, 1.0])
def test_the_root_of_a_mean_of_zeros_is_that_of_nothing_known(power: float, dtype: torch.dtype) -> None:
    assert torch.equal(inverse_root(torch.zeros(3, 3, dtype=dtype), power, 1e-3), torch.eye(3, dtype=dtype))
    assert inverse_root(1e-12 * torch.eye(3, dtype=dtype), power, 1e-3).isfinite().all()


def adapted(ctx: Any, told: Any) -> bool:
    """Whether all weights are numbers after two steps, in the first of which half of each adapter has no gradient."""
    run, feed, _ = started(ctx, told, "dp=1")
    reports = [train_step(run, feed.fetch(step, run.leaves)) for step in range(2)]
    return all(slot.master.isfinite().all() for slot in run.local.slots) and not any(r.bad for r in reports)


@pytest.mark.parametrize("optimizer", ["kfac", "shampoo", "soap", "muon"])
def test_an_adapter_whose_half_has_no_gradient_at_first_stays_a_number(threads, tmp_path, optimizer) -> None:
    told = recipe(tmp_path, dtype="float32", optimizer=optimizer, lora_rank=2)
    assert threads(adapted, 1, told=told) == [True]
