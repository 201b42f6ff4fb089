"""Muon against torch's own, against the singular vectors, and over ranks, micro-batches and stages."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.train.small import recipe, started
from unisono.config import TrainConfig, resolve
from unisono.models.chain import Chain
from unisono.models.plain import UserModel
from unisono.parallel.params import Slot
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.layout import Anatomy
from unisono.spec.training import UpdateSizes
from unisono.train.build.stepped_by import stepped_by
from unisono.train.step.train_step import train_step
from unisono.train.step.update import make, state_of
from unisono_contrib.train.optim._muon_steps import MuonSteps, orthogonal, orthogonal_within
from unisono_contrib.train.optim.muon import Muon

SHAPES = [(6, 4), (4, 6), (5, 5), (64, 16)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_in_bf16_its_steps_are_those_of_torch_to_the_bit() -> None:
    ours, theirs = ([nn.Parameter(randn(*s, dtype=torch.float32)) for s in SHAPES] for _ in range(2))
    live = Muon(muon_bf16=True).bind([{"params": ours, "weight_decay": 0.1}], 0.02, False)
    torchs = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = randn(*a.shape, seed=step, dtype=torch.float32)
        live.step()
        torchs.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay_and_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    u, s, vh = torch.linalg.svd(randn(*shape), full_matrices=False)
    x = u @ torch.diag(s.clamp(min=0.2)) @ vh
    inside = u.T @ orthogonal(x, 5) @ vh.T
    values = inside.diagonal()
    assert bool(((values > 0.65) & (values < 1.25)).all())
    assert float((inside - values.diag()).abs().max()) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_an_error_passes_no_further_than_its_bound(shape: tuple[int, int]) -> None:
    for seed, size in ((1, 1e-3), (2, 1e-6)):
        x, error = randn(*shape), size * randn(*shape, seed=seed)
        value, bound = orthogonal_within(x + error, error.abs(), 5, 2.0**-48)
        off = (orthogonal(x, 5) - value).abs()
        assert bool((off <= bound).all())
    flat, error = torch.ones(shape, dtype=torch.float64), 1e-7 * randn(*shape)
    value, bound = orthogonal_within(flat + error, error.abs(), 5, 2.0**-48)
    off = (orthogonal(flat, 5) - value).abs()  # of rank one: what is next to nothing is stretched most
    assert bool((off <= bound).all()) and float(off.norm()) > 50 * float(error.norm() / flat.norm())


def test_its_law_in_float32_holds_its_steps() -> None:
    member, weight = Muon(), nn.Parameter(randn(32, 8, dtype=torch.float32))
    live = member.bind([{"params": [weight], "weight_decay": 0.1}], 0.05, False)
    live.state[weight] = member.state(weight)
    for step in range(4):
        before = weight.detach().double()
        held = {key: value.double().clone() for key, value in live.state[weight].items()}
        weight.grad = randn(32, 8, seed=step + 1, dtype=torch.float32)
        live.step()
        sizes = UpdateSizes(0.05, 0.1, step, 16 * 2.0**-24)
        law = member.law(sizes, before, held, weight.grad.double(), torch.zeros(32, 8, dtype=torch.float64))
        for key, (value, error) in law.items():
            seen = weight if key == "param" else live.state[weight][key]
            assert bool(((seen.double() - value).abs() <= error).all()), key


def test_matrices_of_blocks_are_its_own_and_all_else_is_adamws() -> None:
    member = Muon(betas=(0.8, 0.9), eps=1e-6)
    assert member.for_parameter("blocks.0.attn.qkv.weight", (48, 16)) is member
    for name, shape in (
        ("stem.tok.weight", (64, 16)), ("stem.pos.weight", (8, 16)), ("head.out.weight", (64, 16)),
        ("blocks.0.norm1.weight", (16,)), ("blocks.0.mlp.experts.up", (4, 32, 16)),
    ):  # fmt: skip
        other = member.for_parameter(name, shape)
        assert other.name == "adamw" and dict(other) == {"betas": (0.8, 0.9), "eps": 1e-6}


PLANS = ["dp=2", "dp=1 micros=4", "dp=2 micros=2", "pp=2 micros=4", "cp=2", "dp=2 sync=canonical"]
CUTS = [
    "shard=2 zero=1",
    "shard=2 zero=2 micros=2",
    "shard=2",
    "tp=2",
    "dp=2 shard=2",
    "shard=2 tp=2",
    "pp=2 tp=2",
]


def weights(ctx, told, plan: str, steps: int = 3) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """By name, this rank's part of each weight and where it begins."""
    run, feed, _ = started(ctx, told, plan)
    for step in range(steps):
        train_step(run, feed.fetch(step, run.leaves))
    return {slot.name: (slot.master.detach().clone(), slot.start) for slot in run.local.slots}


def part_of(whole: torch.Tensor, start: tuple[int, ...], shape: torch.Size) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]


def test_any_way_to_spread_a_model_makes_the_steps_of_one_device(threads, tmp_path):
    told = recipe(tmp_path, optimizer="muon", clip=1.0)
    (alone,) = threads(lambda ctx: weights(ctx, told, "dp=1 precision=fp64"), 1)
    (adam,) = threads(lambda ctx: weights(ctx, recipe(tmp_path, clip=1.0), "dp=1 precision=fp64"), 1)
    hidden = [name for name, (x, _) in alone.items() if name.startswith("blocks.") and x.dim() == 2]
    assert hidden and all(not torch.allclose(alone[n][0], adam[n][0], rtol=1e-3) for n in hidden)
    for plan in [*PLANS, *CUTS]:
        ranks = Plan.parse(plan).world
        for part in threads(lambda ctx, plan=plan: weights(ctx, told, f"{plan} precision=fp64"), ranks):
            for name, (x, start) in part.items():
                whole = part_of(alone[name][0], start, x.shape)
                assert torch.allclose(x, whole, rtol=1e-9, atol=1e-10), (plan, name)


def counted(ctx, told, plan: str) -> list[int]:
    """Directions that this rank computed in each of two steps."""
    run, feed, _ = started(ctx, told, plan)
    (live,) = [part for part in run.update.optimizer.parts if isinstance(part, MuonSteps)]  # type: ignore[attr-defined]
    inner, calls = live.direction, [0]

    def direction(*args: Any) -> torch.Tensor:
        calls[-1] += 1
        return inner(*args)

    live.direction = direction  # type: ignore[method-assign]
    for step in range(2):
        train_step(run, feed.fetch(step, run.leaves))
        calls.append(0)
    return calls[:2]


@pytest.mark.parametrize("plan", [*PLANS, *CUTS, "dp=4", "dp=2 tp=2 micros=2", "shard=4 zero=3"])
def test_a_group_computes_as_many_directions_as_one_device(threads, tmp_path, plan: str) -> None:
    told = recipe(tmp_path, optimizer="muon")
    (alone,) = threads(lambda ctx: counted(ctx, told, "dp=1"), 1)
    ranks = threads(lambda ctx: counted(ctx, told, plan), Plan.parse(plan).world)
    assert alone[0] == 8 and [sum(calls) for calls in zip(*ranks, strict=True)] == alone
    assert max(calls[0] for calls in ranks) <= 1 + alone[0] // len(ranks)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ("dp=2 precision=bf16:stochastic", "masters"),
    ],
)
def test_a_plan_that_cuts_matrices_is_refused_by_name(tmp_path, plan: str, word: str) -> None:
    told = recipe(tmp_path, optimizer="muon", dtype="float32")
    with pytest.raises((ConfigProblems, UsageError)) as caught:
        resolve(told, plan, 2)
    assert "P28" in str(caught.value) or "muon" in str(caught.value)
    assert word in str(caught.value)


def test_a_part_of_a_matrix_is_refused_where_the_plan_did_not_say_that_it_is_one() -> None:
    whole, part = (nn.Parameter(randn(rows, 4, dtype=torch.float32)) for rows in (8, 4))
    make(
        TrainConfig(optimizer="muon"), [Slot("blocks.0.w", whole, whole, (8, 4), (0, 0))], torch.device("cpu")
    )
    slots = [Slot("blocks.0.w", part, part, (8, 4), (4, 0))]
    with pytest.raises(UsageError, match="muon needs the whole of"):
        make(TrainConfig(optimizer="muon"), slots, torch.device("cpu"))


def test_a_model_of_which_nobody_says_what_is_inside_is_refused() -> None:
    own, plain = (
        UserModel(nn.Linear(3, 3)),
        Chain(nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 2), Anatomy()),
    )
    with pytest.raises(UsageError, match="not known which these are"):
        stepped_by(TrainConfig(optimizer="muon"), own)
    assert stepped_by(TrainConfig(), own) == []
    assert stepped_by(TrainConfig(optimizer="muon"), plain) == [
        "optimizer: adamw steps 5 tensors of 30 weights, muon steps 1 tensors of 16 weights"
    ]


def test_a_saved_run_goes_on_with_both_optimisers_states(threads, tmp_path) -> None:
    told = recipe(tmp_path, optimizer="muon")

    def states(ctx) -> tuple[list[str], int]:
        run, feed, _ = started(ctx, told, "dp=1 precision=fp64")
        train_step(run, feed.fetch(0, run.leaves))
        optimizer = run.update.optimizer
        kept = {slot.name: state_of(optimizer, slot.master) for slot in run.local.slots}
        assert all(bool(x.any()) for state in kept.values() for x in state.values())
        return [name for name, state in kept.items() if list(state) == ["momentum_buffer"]], len(kept)

    ((muons, count),) = threads(states, 1)
    assert muons and all(name.startswith("blocks.") for name in muons) and len(muons) < count
