"""Parameters in bf16 that are rounded at random after each update."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.test_masters import stored
from tests.threads import prove
from tests.train.small import recipe
from unisono.config import TrainConfig
from unisono.parallel.params import Slot
from unisono.parallel.stochastic import KEPT, Dither
from unisono.plan import Plan
from unisono.plan.fidelity import beside_like, fidelity_of
from unisono.planner.states import states, states_of_ours
from unisono.spec.fidelity import Fidelity
from unisono.sync import Verdict
from unisono.train.step.numbers import Numbers
from unisono.train.step.update import state_of, update_of


def whole(x: torch.Tensor, step: int = 0, name: str = "w", seed: int = 5) -> torch.Tensor:
    return Dither(seed, step=step).rounded(x, name, (0,) * x.dim(), x.shape)


def test_the_mean_of_many_draws_is_the_number() -> None:
    x = torch.tensor([1.001, -3.3, 1e-3, 7e-20, -1.9999, 2.0**-130 * 1.3], dtype=torch.float32)
    draws, ulp = 4000, (2.0**-7 * x.abs().double()).clamp(min=2.0**-133)
    seen = torch.stack([whole(x, step) for step in range(draws)]).double()
    assert ((seen.mean(0) - x.double()).abs() <= 5 * ulp / math.sqrt(draws)).all()
    assert all(len(set(column.tolist())) == 2 for column in seen.T)
    assert ((seen - x.double()).abs() <= ulp).all()


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 7), width=st.integers(1, 9), cut=st.data(), step=st.integers(0, 9))
def test_whoever_holds_an_element_draws_the_same(rows: int, width: int, cut: Any, step: int) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    full = whole(x, step)
    top, left = cut.draw(st.integers(0, rows)), cut.draw(st.integers(0, width))
    box = Dither(5, step=step).rounded(x[top:, left:], "w", (top, left), x.shape)
    assert torch.equal(box, full[top:, left:])


def test_draws_differ_by_seed_step_and_name_and_are_shared_by_a_tied_weight() -> None:
    x = torch.randn(64, 8)
    kinds = [whole(x), whole(x, step=1), whole(x, name="v"), whole(x, seed=6)]
    assert not any(torch.equal(a, b) for i, a in enumerate(kinds) for b in kinds[:i])
    tied = Dither(5, {"alias": "w"}).rounded(x, "alias", (0, 0), x.shape)
    assert torch.equal(tied, kinds[0])


def test_what_bf16_holds_and_what_is_no_number_stay() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -(2.0**-133), math.inf, -math.inf, math.nan])
    for step in range(20):
        assert torch.equal(whole(x, step).float().nan_to_num(nan=7.0), x.nan_to_num(nan=7.0))
    assert whole(torch.tensor(1.001), 3).shape == ()
    assert whole(torch.empty(0, 4)).shape == (0, 4)


def test_updates_below_half_a_digit_add_up() -> None:
    p = torch.nn.Parameter(torch.ones(2000, dtype=KEPT))
    p.grad_dtype = torch.float32
    train = TrainConfig(
        optimizer="sgd", momentum=0.0, lr=1e-4, min_lr=1e-4, warmup_steps=0, lr_schedule="constant", clip=0.0
    )
    update = update_of(train, [Slot("w", p, p, (2000,), (0,))], torch.device("cpu"))
    for step in range(100):
        p.grad = torch.ones(2000)
        update(step, Verdict.APPLY, Numbers(0.0, 0.0, False))
    assert abs(p.float().mean().item() - 0.99) < 5 * 2.0**-8 / math.sqrt(2000)
    assert (torch.tensor(1.0, dtype=KEPT) - 1e-4).to(KEPT) == 1.0  # where nothing is drawn, nothing moves


@pytest.mark.parametrize("plan", ["dp=1", "shard=2 zero=2", "pp=2"])
def test_parameters_are_bf16_and_the_optimisers_state_fp32(threads: Any, tmp_path: Path, plan: str) -> None:
    for pieces, held, _ in threads(stored, 2 if plan != "dp=1" else 1, group=plan != "dp=1", folder=str(tmp_path),
                                   plan=f"{plan} precision=bf16:stochastic"):  # fmt: skip
        assert {x.dtype for x in held.values()} == {KEPT}
        assert {x.dtype for name, x in pieces.items() if name.startswith("model/")} == {KEPT}
        assert {x.dtype for name, x in pieces.items() if name.startswith("optim/")} == {torch.float32}


def test_nothing_stands_for_a_parameter_between_steps() -> None:
    p = torch.nn.Parameter(torch.ones(33, 3, dtype=KEPT))
    p.grad_dtype = torch.float32
    update = update_of(TrainConfig(), [Slot("w", p, p, (33, 3), (0, 0))], torch.device("cpu"), even=True)
    p.grad = torch.ones(33, 3)
    update(0, Verdict.APPLY, Numbers(0.0, 0.0, False))
    (stand_in,) = [x for group in update.optimizer.param_groups for x in group["params"]]
    assert stand_in.numel() == 0 and stand_in.grad is None
    assert state_of(update.optimizer, p)["exp_avg"].shape == p.shape


def test_it_costs_fourteen_bytes_an_element() -> None:
    plan = Plan.parse("precision=bf16:stochastic")
    assert states_of_ours(1.0, plan, 1, 2) == (2.0, 4.0, 8.0)
    assert sum(states_of_ours(1.0, plan, 1, 2)) == 14.0
    assert sum(states(1.0, shard=1, zero=3, precision="bf16", grad_bytes=4)) == 18.0


def test_it_is_lossy_and_held_to_the_same_draws() -> None:
    for text, held in (
        ("pp=2", Fidelity.EXACT),
        ("dp=2", Fidelity.ROUNDING),
        ("dp=2 sync=canonical", Fidelity.EXACT),
    ):
        plan = Plan.parse(f"{text} precision=bf16:stochastic")
        assert fidelity_of(plan) is Fidelity.LOSSY and beside_like(plan) is held


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_without_masters_are_proven(tmp_path: Path) -> None:
    plans = ["pp=2", "dp=2 shard=2 zero=2", "shard=2 pp=2", "dp=2 sync=canonical", "shard=2 pp=2 sync=canonical",
             "dp=2 offload=optimizer"]  # fmt: skip
    told = recipe(tmp_path, global_batch=4, micro_batch=1, dtype="float32")
    for proof in prove(told, [Plan.parse(f"{text} precision=bf16:stochastic") for text in plans], steps=2):
        assert proof.passed and proof.verdict == "proven" and proof.fidelity == "LOSSY", proof
        assert proof.bit_identical == (beside_like(Plan.parse(proof.plan)) is Fidelity.EXACT), proof
