"""tp=RxC: products of matrices on ranks in rows and columns equal one device's, whatever divides."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.parallel.test_parallelize import held
from tests.parallel.test_uneven import LLAMA
from tests.threads import prove
from tests.train.small import recipe as small
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.parallel.parts import part_of
from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.spec.layout import Units
from unisono_contrib.parallel.grid import GridGroups, GridLinear, GridNorm

pytestmark = pytest.mark.timeout(300)


def recipe(**model):
    """Neither heads nor widths nor samples nor the vocabulary are multiples of the rows or columns."""
    sizes = {"n_layer": 2, "n_head": 5, "d_model": 20, "d_ff": 51, "context": 7, "dropout": 0.1, **model}
    train = TrainConfig(
        steps=4, global_batch=6, micro_batch=3, dtype="float64", lr=1e-2, clip=0.5, weight_decay=0.1
    )
    return Recipe(seed=3, model=ModelConfig(**sizes), train=train)


@pytest.mark.parametrize(
    ("model", "plans"),
    [
        pytest.param({}, ["tp=2x3"], marks=pytest.mark.slow),  # as the second's, and blocks of 2x3 below
        ({}, ["dp=2 tp=2x2 sync=canonical"]),
        ({"n_head": 4, "n_kv_head": 2, "d_model": 24, **LLAMA}, ["tp=2x3 recompute=full", "tp=2x2 pp=2 schedule=zb1p"]),
        ({}, ["tp=2x2 shard=2"]),
    ],
)  # fmt: skip
def test_a_grid_equals_one_device(model, plans):
    for proof in prove(recipe(**model), [Plan.parse(text) for text in plans], steps=2):
        assert proof.passed, proof
        assert max(proof.max_rel_err.values()) < 1e-10, proof


@given(st.integers(2, 9), st.integers(2, 9))
def test_a_grid_is_its_number_of_ranks_and_stays_a_grid(rows, columns):
    plan = Plan.parse(f"dp=2 tp={rows}x{columns}")
    again = Plan.parse(str(plan))
    assert again == plan and hash(again) == hash(plan) and again.tp == deepcopy(plan.tp)
    assert plan.tp > 1 and plan.world == 2 * rows * columns
    assert plan != replace(plan, tp=rows * columns) and (plan == replace(plan, tp=Grid(columns, rows))) == (
        rows == columns
    )


def test_what_a_grid_cannot_deal_is_told_with_its_remedy():
    def problems(text, **model):
        return Plan.parse(f"{text} precision=fp64").check(recipe(**model))

    told = {text: {p.code for p in problems(text)} for text in ("tp=2x5", "tp=2x6", "tp=4x2")}
    assert told == {"tp=2x5": set(), "tp=2x6": {"P12"}, "tp=4x2": {"P11"}}
    (moe,) = problems("tp=2x2", kind="moe")
    assert moe.code == "P12" and moe.fix == "tp=4"
    with pytest.raises(Exception, match="one row or one column"):
        Plan.parse("tp=1x4")


def block(ctx, rows, columns):
    """One product and one norm, with their gradients, beside the whole ones."""
    from datetime import timedelta

    from unisono.comm.mesh import Mesh, Shape
    from unisono.observe.span import Recorder
    from unisono_contrib.parallel.grid import grid_groups

    mesh = Mesh(Shape(tp=ctx.world), ctx.rank, Recorder(), timedelta(seconds=60))
    groups: GridGroups = grid_groups(mesh, Grid(rows, columns))
    torch.manual_seed(0)
    whole, norm = nn.Linear(7, 5).double(), nn.LayerNorm(7).double()
    x, weights = torch.randn(3, 2, 7).double(), torch.randn(3, 2, 5).double()
    samples, features = part_of(3, groups.column), part_of(7, groups.row)
    outputs, inputs = part_of(5, groups.row), part_of(7, groups.column)
    part = GridLinear(whole, groups, Units(7), Units(5)), GridNorm(norm, groups)
    mine = x.narrow(0, *samples).narrow(2, *features).clone().requires_grad_()
    y = part[0](part[1](mine))
    (y * weights.narrow(0, *samples).narrow(2, *outputs)).sum().backward()
    x.requires_grad_()
    expected = whole(norm(x))
    (expected * weights).sum().backward()
    first = groups.column.index
    own = norm.weight.grad.narrow(0, *features).tensor_split(groups.column.size)[first]
    return {
        "y": (y - expected.narrow(0, *samples).narrow(2, *outputs)).abs().max().item(),
        "x": (mine.grad - x.grad.narrow(0, *samples).narrow(2, *features)).abs().max().item(),
        "weight": (part[0].weight.grad - whole.weight.grad.narrow(0, *outputs).narrow(1, *inputs)).abs().max().item(),
        "norm": (part[1].weight.grad - own).abs().max().item(),
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (3, 2), (2, 3)])
def test_blocks_of_a_product_and_a_norm_equal_whole_ones(threads, rows, columns):
    for errors in threads(block, rows * columns, rows=rows, columns=columns):
        assert max(errors.values()) < 1e-12, errors


def test_blocks_tile_the_model_so_a_checkpoint_knows_no_grid(threads, tmp_path):
    told = small(tmp_path, micro_batch=2)
    (whole,) = threads(held, 1, group=False, told=told, plan="dp=1")
    values = {name: value for name, _, _, value, _ in whole}
    times = {name: torch.zeros(value.shape) for name, value in values.items()}
    for rank in threads(held, 4, told=told, plan="tp=2x2"):
        for name, _, start, value, counted in rank:
            box = tuple(slice(a, a + n) for a, n in zip(start, value.shape, strict=True))
            assert torch.equal(values[name][box], value), name
            times[name][box] += counted
    for name, count in times.items():
        assert bool((count == (name != "head.out.weight")).all()), name
