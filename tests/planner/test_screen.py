"""A plan of the screen costs what it costs alone, to the last digits."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.planner.published import gpt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.machines.order import USUAL, Order
from unisono.planner.model_kinds import with_optimiser
from unisono.planner.price import price
from unisono.planner.pricing import verdict
from unisono.planner.request import PlanRequest
from unisono.planner.screen import least_memory, least_seconds, screen
from unisono.planner.search_arrays import Axes, SearchShared
from unisono.planner.stack import stack
from unisono.planner.studies.orders import read
from unisono.planner.work.experts import Experts
from unisono.planner.work.transformer import Transformer
from unisono.spec.training import OPTIMISERS

SCHEDULES = (
    "1f1b", "gpipe", "interleaved:v=2", "interleaved:v=3", "looped_bfs:v=2", "zb1p", "zb2p", "zbv", "dualpipe",
    "dualpipev",
)  # fmt: skip
MODELS = (
    gpt(24, 16, 2048, 1024),
    gpt(50, 32, 4096, 2048, vocab=128256, noisy=False),
    Transformer(
        31, 16, 4096, 4096, 32000, 8, 14336, bias=False, tied=False, learned=False, gated=True, rms=True
    ),
)
SPARSE = Transformer(
    24, 16, 2048, 2048, 32000, 16, 5632, bias=False, tied=False, learned=False, gated=True, rms=True,
    experts=Experts(16, 2, 1408, shared_width=1408, every=2, dense=1),
)  # fmt: skip
CLUSTERS = (("dgx-a100:8", "megatron-2022"), ("dgx-h100:8", "megatron-2024"), ("dgx-a100:8", "plain"))


def axes(mesh: Plan, batch: int) -> Axes:
    share = batch // mesh.replicas
    return Axes(
        zeros=(1, 2, 3) if mesh.shard > 1 else (3,),
        modes=("none", "selective", "full"),
        sizes=tuple((b, share // b) for b in (1, 2, 4) if share % b == 0),
        kinds=("ring", "ulysses") if mesh.cp > 1 else ("ring",),
        schedules=SCHEDULES if mesh.pp > 1 else ("1f1b",),
    )


@pytest.mark.parametrize("name", CLUSTERS, ids=lambda pair: pair[1])
def test_experts_are_screened_as_they_are_priced(name: tuple[str, str]) -> None:
    meshes = (
        "dp=2 shard=4 tp=2 pp=4 ep=8",
        "shard=16 pp=4 ep=4",
        "tp=4 cp=2 pp=8 ep=2",
        "dp=8 tp=8 ep=16",
        "tp=8 pp=8",
    )
    assert held_together(SPARSE, name, meshes) >= 60


def plan_at(mesh: Plan, all_of: Axes, at: tuple[int, ...]) -> tuple[Plan, int, int]:
    way, mode, size, kind, schedule = at
    micro_batch, micros = all_of.sizes[size]
    plan = replace(
        mesh, zero=all_of.zeros[way], recompute=all_of.modes[mode], cp_kind=all_of.kinds[kind],
        schedule=all_of.schedules[schedule],
    )  # fmt: skip
    return plan, micro_batch, micros


MESHES = (
    "dp=4 tp=2 pp=8", "dp=2 shard=2 pp=4 tp=2 cp=2", "shard=8 tp=8", "dp=64", "pp=16 tp=4", "dp=2 shard=16 pp=2",
    "cp=4 tp=4 pp=4", "dp=8 shard=2 pp=4 codec=tests/codecs/own.py:Rounded zero=2", "dp=4 shard=4 tp=4 sync=canonical", "dp=16 tp=2 pp=2", "pp=6 tp=2 dp=2",
    "dp=8 tp=2 pp=2 codec=tests/codecs/own.py:Largest", "dp=4 shard=2 tp=2 sync=canonical", "dp=16 pp=4 sync=canonical zero=1", "dp=8 tp=8 codec=tests/codecs/own.py:Rounded sync=canonical",
)  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS, ids=lambda pair: pair[1])
@pytest.mark.parametrize("model", MODELS, ids=("small", "wide", "gated"))
def test_the_screen_says_what_the_price_says(model: Transformer, name: tuple[str, str]) -> None:
    assert held_together(model, name, MESHES) >= 100


def test_the_screen_says_so_of_matrices_that_have_owners() -> None:
    for optimiser in ("muon", "soap"):
        model = with_optimiser(MODELS[2], OPTIMISERS.read(optimiser))
        assert isinstance(model, Transformer)
        assert held_together(model, CLUSTERS[0], MESHES[:6]) >= 60


def test_the_screen_says_so_under_other_orders_of_axes_too() -> None:
    """Though a search screens the usual one alone."""
    order = read("dp,pp,shard")
    assert held_together(MODELS[0], CLUSTERS[0], MESHES[:3], order) >= 25
    assert held_together(SPARSE, CLUSTERS[0], ("dp=2 shard=4 tp=2 pp=4 ep=2", "tp=8 pp=8 ep=4"), order) >= 15


def held_together(
    model: Transformer, name: tuple[str, str], meshes: Sequence[str], order: Order = USUAL
) -> int:
    """How many random plans of these meshes cost in the screen what they cost alone."""
    where, made = replace(cluster(name[0]), order=order), stack(name[1])
    bench, dice, priced = SearchShared(model, where, made), Random(7), 0
    for text in meshes:
        mesh = Plan.parse(f"{text} precision=bf16")
        if mesh.pp > model.n_layer:
            continue
        own = axes(mesh, 256)
        got = screen(bench, mesh, own)
        step, memory, fits = np.broadcast_arrays(got.step, got.memory, got.fits)
        least = least_seconds(bench, mesh, own), least_memory(bench, mesh, own)
        served = own.served(mesh.pp, model.n_layer)
        assert step.shape == own.shape
        for _ in range(25):
            at = tuple(dice.randrange(size) for size in own.shape)
            if not served[at[2], at[4]]:
                assert not fits[at]
                continue
            plan, micro_batch, micros = plan_at(mesh, own, at)
            alone = price(model, plan, where, made, micro_batch=micro_batch, micros=micros)
            own_verdict = verdict(PlanRequest(model, plan, where, made, micro_batch, micros))
            assert step[at] == pytest.approx(alone.step, rel=1e-9), plan
            need = own_verdict.memory.allocated * (1.0 + made.slack)
            assert memory[at] == pytest.approx(need, rel=1e-9), plan
            assert fits[at] == own_verdict.is_safe, plan
            assert alone.step >= least[0] * (1 - 1e-9) and need >= least[1] * (1 - 1e-9), plan
            priced += 1
    return priced
