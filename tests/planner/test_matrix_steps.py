"""What owners of matrices are said to keep, send and compute is what a run's owners keep, send and compute."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.train.small import recipe, started
from unisono.config import ModelConfig, Recipe, resolve
from unisono.models.build import build
from unisono.models.lora import adapt
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.machines.order import dealers
from unisono.planner.memory import share_of
from unisono.planner.model_kinds import Model, declared, with_optimiser
from unisono.planner.pricing import closed
from unisono.planner.request import PlanRequest
from unisono.planner.simulate import simulate
from unisono.planner.stack import stack
from unisono.planner.states import moments_of
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec.model import Facts
from unisono.spec.training import OPTIMISERS, Optimiser
from unisono.train.step.train_step import train_step
from unisono_contrib.planner.work.matrix_steps import OwnedMatrix, shapes_of
from unisono_contrib.train.optim._whole_steps import WholeSteps

RUNS = [
    *(("muon", plan) for plan in ("dp=2", "shard=2", "tp=2", "dp=2 shard=2", "pp=2 tp=2", "cp=2")),
    *(("shampoo", plan) for plan in ("dp=2", "shard=2 zero=1 tp=2")),
    *(("soap", plan) for plan in ("dp=2 shard=2", "pp=2 tp=2")),
    *(("kfac", plan) for plan in ("dp=2", "shard=2 tp=2")),
]
GATHERING = [member for name in OPTIMISERS.names() if (member := OPTIMISERS.read(name)).gathers]


def sizes(told: Recipe) -> Transformer:
    """The numbers of a recipe's model, as its optimiser steps it."""
    model = with_optimiser(transformer(told.model, 256), told.train.optimiser())
    assert isinstance(model, Transformer)
    return model


def counted(ctx: Any, told: Recipe, plan: str) -> tuple[int, int, int]:
    """Of one rank: its row, bytes that it sends owners and others in the second step, and numbers of state."""
    run, feed, _ = started(ctx, told, plan)
    train_step(run, feed.fetch(0, run.leaves))
    run.recorder.lap()
    train_step(run, feed.fetch(1, run.leaves))
    sent = sum(n for (axis, _), n in run.recorder.lap().nbytes.items() if axis == "owners")
    states = run.update.optimizer.state.values()
    kept = sum(
        x.numel() for state in states for x in state.values() if isinstance(x, torch.Tensor) and x.dim()
    )
    return run.mesh.at["pp"], sent, kept


@pytest.mark.parametrize(("name", "text"), RUNS)
def test_what_is_priced_is_what_a_run_sends_and_keeps(
    threads: Any, tmp_path: Any, name: str, text: str
) -> None:
    told, text = recipe(tmp_path, optimizer=name), f"{text} precision=fp64"
    model, plan = sizes(told), resolve(told, text, Plan.parse(text).world).plan
    ranks = threads(counted, plan.world, told=told, plan=text)
    price = closed(PlanRequest(model, plan, cluster("dgx-a100:1"), stack("plain"), 2, plan.micros or 1))
    for row in range(plan.pp):
        here = [rank for rank in ranks if rank[0] == row]
        assert price.comm["owners"].bytes == sum(sent for _, sent, _ in here) / len(here)
        share = share_of(model, plan, row, True)
        elements = share.blocks + share.ends
        kept = moments_of(model, plan, elements, share.layers) * elements / dealers(plan)
        assert kept == pytest.approx(max(kept for _, _, kept in here), rel=1e-6)


def test_bytes_of_steps_in_bf16_are_half(threads: Any, tmp_path: Any) -> None:
    told = recipe(tmp_path, optimizer="muon", muon_bf16=True, dtype="float32")
    plan = resolve(told, "dp=2", 2).plan
    ranks = threads(counted, 2, told=told, plan="dp=2")
    price = closed(PlanRequest(sizes(told), plan, cluster("dgx-a100:1"), stack("plain"), 2, 1))
    assert price.comm["owners"].bytes == sum(sent for _, sent, _ in ranks) / 2


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(n_layer=2, n_head=4, d_model=24, context=8),
        ModelConfig(n_layer=2, n_head=4, n_kv_head=2, d_model=24, context=8, activation="swiglu", norm="rms"),
        ModelConfig(
            kind="moe", n_layer=2, n_head=4, d_model=24, n_experts=4, n_shared_experts=2, moe_every=2
        ),
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_matrices_that_are_priced_are_those_of_the_program(config: ModelConfig, rank: int) -> None:
    module = build(config, Facts(vocab=64))
    if rank:
        adapt(module, rank, 1.0, ("*",))
    seen = [
        sorted(
            tuple(p.shape)
            for name, p in module.named_parameters()
            if name.startswith(f"blocks.{layer}.") and p.dim() == 2 and p.requires_grad
        )
        for layer in range(2)
    ]
    model = declared(config, Facts(vocab=64))
    assert isinstance(model, Transformer)
    said = shapes_of(Transformer(**{**vars(model), "lora": rank}))
    assert [sorted((shape.rows, shape.columns) for shape in block) for block in said] == seen


def test_linear_layers_of_networks_are_priced_and_convolutions_are_not() -> None:
    facts = Facts(classes=10, sample_shape=(3, 4, 4))

    def blocks(model: Model) -> tuple[tuple[OwnedMatrix, ...], ...]:
        return with_optimiser(model, OPTIMISERS.read("soap")).steps.blocks  # type: ignore[union-attr]

    mlp, convnet = ModelConfig(kind="mlp", hidden=(8, 16)), ModelConfig(kind="convnet", channels=8)
    assert [[x.elements for x in block] for block in blocks(declared(mlp, facts))] == [[384, 64], [128, 256]]
    assert not any(blocks(declared(convnet, facts)))


@pytest.mark.parametrize("member", GATHERING, ids=lambda member: member.name)
def test_the_work_of_a_matrix_is_what_the_live_optimiser_says(member: Optimiser) -> None:
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    live = member.bind([{"params": [weight], "weight_decay": 0.0}], 0.1, False)
    assert isinstance(live, WholeSteps)
    for shape in ((6, 4), (4, 6), (5, 5)):
        work = member.matrix_work(shape)
        assert work.cost == live.cost(shape)
        state = member.state(torch.empty(shape))
        assert work.kept == sum(x.numel() for x in state.values() if x.dim())


@pytest.mark.parametrize("text", ["muon", "shampoo", "soap"])
def test_products_are_those_that_are_computed(text: str) -> None:
    member = OPTIMISERS.read(text)
    for shape in ((6, 4), (4, 6), (5, 5)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        live = member.bind([{"params": [weight], "weight_decay": 0.0}], 0.1, False)
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        live.step()  # the first one decomposes too
        with FlopCounterMode(display=False) as seen:
            live.step()
        assert member.matrix_work(shape).products == seen.get_total_flops()


def test_long_edges_keep_and_decompose_nothing() -> None:
    member = OPTIMISERS.read("soap:curvature_edge=5,curvature_interval=2")
    work = member.matrix_work((6, 4))
    assert work.kept == 2 * 24 + 2 * 16
    assert work.decompositions == 9 * 4**3 / 2


def test_owners_divide_the_work_and_each_keeps_its_own(tmp_path: Any) -> None:
    """Of sixteen equal blocks each of four owners has a quarter, in seconds and in bytes of state."""
    told = recipe(tmp_path, optimizer="soap", dtype="float32", global_batch=4, micro_batch=1)
    told = told.model_copy(update={"model": ModelConfig(n_layer=16, n_head=8, d_model=512, context=64)})
    model, plain = sizes(told), transformer(told.model, 256)

    def asked(model: Transformer, plan: str) -> tuple[float, float]:
        ask = PlanRequest(model, Plan.parse(plan), cluster("dgx-a100:1"), stack("plain"), 1, 1)
        answer = simulate(ask)
        return answer.price.optimizer, answer.verdict.memory.optim

    (seconds, kept), (seconds4, kept4) = asked(model, "dp=1"), asked(model, "dp=4")
    before, adam = asked(plain, "dp=1")
    assert seconds - seconds4 == pytest.approx(0.75 * (seconds - before), rel=0.1)
    edges = 16 * sum(2 * (m * m + n * n) for m, n in ((1536, 512), (512, 512), (2048, 512), (512, 2048)))
    assert kept == pytest.approx(adam + 4 * edges)
    blocks = 2 * 4 * 16 * 512 * (1536 + 512 + 2048 + 2048)
    assert kept4 == pytest.approx(adam - blocks + (blocks + 4 * edges) / 4)
