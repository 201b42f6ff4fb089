"""The workload piece by piece: pieces add up to the model and to the price's own traffic, for every kind of model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.published import gpt
from tests.planner.test_host import MODEL as SMALL
from tests.planner.test_host import here
from unisono.cli import main
from unisono.models.convnet import convnet
from unisono.models.convnet.resnet import resnet
from unisono.models.dlrm import dlrm
from unisono.models.mlp import mlp
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.memory import kept_of
from unisono.planner.pieces import ModelPiece, pieces
from unisono.planner.priced import Model
from unisono.planner.simulate import Answer, Question, simulate
from unisono.planner.stack import stack
from unisono.planner.work.experts import Experts
from unisono.planner.work.networks import Network

DENSE = gpt(24, 16, 2048, 1024)
SPARSE = replace(DENSE, experts=Experts(count=16, top_k=2, width=4096, shared_width=2048, every=2, dense=4))
MODELS: Mapping[str, Model] = {
    "tied": DENSE,
    "gated": replace(DENSE, tied=False, gated=True, rms=True, bias=False, learned=False, kv_heads=8),
    "sparse": SPARSE,
    "resnet": Network(resnet("50")),
    "convnet": Network(convnet(image=(3, 32, 32), channels=32, n_layer=6, classes=10), by_weights=True),
    "mlp": Network(mlp(features=64, hidden=(256,) * 6, classes=10), by_weights=True),
    "dlrm": Network(
        dlrm(tables=[10**6] * 8, width=64, lookups=4, dense=13, bottom=(512, 256), top=(512, 256)),
    ),
}
PLANS = (
    "dp=32", "dp=4 shard=8 zero=1", "dp=2 shard=16 zero=2", "dp=2 shard=16 zero=3", "shard=32 zero=3 recompute=full",
    "dp=4 tp=8", "dp=2 tp=4 cp=4", "dp=4 shard=2 zero=3 tp=4 recompute=selective", "dp=4 shard=4 ep=4 tp=2 zero=1",
    "shard=32 ep=8 zero=1", "dp=32 codec=int8", "dp=32 sync=local_sgd:h=4", "tp=4 shard=8 ep=4",
    "dp=8 tp=4 recompute=auto",
)  # fmt: skip


def answered(model: Model, plan: str, made: str = "megatron-2022") -> Answer:
    where = cluster("dgx-a100:4")
    keys = Plan.parse(f"{plan} precision=bf16").fill(where.devices)
    return simulate(Question(model, keys, where, stack(made), 2, 4))


def cases() -> list[Any]:
    found = []
    for name, model in MODELS.items():
        for plan in PLANS:
            keys = Plan.parse(plan)
            parts = isinstance(model, Network)
            if parts and (keys.tp > 1 or keys.cp > 1):
                continue
            if keys.ep > 1 and name not in ("sparse", "dlrm"):
                continue
            found.append(pytest.param(model, plan, id=f"{name} {plan}"))
    return found


def summed(every: Sequence[ModelPiece], axis: str) -> float:
    return sum(one.count * one.sent.get(axis, 0.0) for one in every if not one.inside)


@pytest.mark.parametrize(("model", "plan"), cases())
def test_pieces_add_up_to_the_model_and_to_what_a_rank_sends(model: Model, plan: str) -> None:
    got = answered(model, plan)
    every = pieces(got)
    beside = [one for one in every if not one.inside]
    work = model.workload
    assert sum(one.count * one.parameters for one in beside) == pytest.approx(work.parameters)
    assert sum(one.count * one.active for one in beside) == pytest.approx(work.active)
    assert sum(one.count * one.flops for one in beside) == pytest.approx(work.flops)
    assert got.price.comm
    for axis, traffic in got.price.comm.items():
        assert summed(every, axis) == pytest.approx(traffic.bytes), axis
    assert {axis for one in every for axis in one.sent} == set(got.price.comm)


def test_blocks_gather_nothing_of_the_ends_weights() -> None:
    small, large = (
        pieces(answered(replace(DENSE, vocab=vocab), "shard=32 zero=3")) for vocab in (1_000, 100_000)
    )
    assert small[1].sent["shard"] == pytest.approx(large[1].sent["shard"])
    assert small[0].sent["shard"] < large[0].sent["shard"] / 10


@pytest.mark.parametrize(
    "plan", ["dp=4 pp=4 tp=2", "dp=2 pp=4 shard=4 zero=2", "dp=4 pp=8", "dp=8 pp=4 schedule=zbv"]
)
@pytest.mark.parametrize("made", ["megatron-2022", "plain"])
def test_of_a_pipeline_the_first_stages_gradients_and_the_mean_stages_activations(
    plan: str, made: str
) -> None:
    got = answered(DENSE, plan, made)
    stem, block, *_, last = pieces(got)
    layers, comm = got.stages[0].blocks, got.price.comm
    ends = 1.0 if "zbv" in plan else 0.0  # both ends lie on the first rank
    head = pieces(got)[2]
    for axis in ("dp", "shard"):
        if axis in comm:
            told = stem.sent[axis] + layers * block.sent[axis] + ends * head.sent[axis]
            assert told == pytest.approx(comm[axis].bytes)
    if "tp" in comm:
        assert block.sent["tp"] * DENSE.n_layer / got.question.plan.pp == pytest.approx(comm["tp"].bytes)
    assert last.sent == {"pp": comm["pp"].bytes}


@pytest.mark.parametrize(
    "plan", ["dp=4", "shard=4 zero=1", "shard=4 zero=3", "dp=2 tp=2 recompute=full", "shard=2 tp=2"]
)
def test_on_a_host_of_shared_cores_they_add_up_too(plan: str) -> None:
    keys = Plan.parse(plan).fill(4)
    got = simulate(Question(SMALL, keys, here(), stack("plain"), 2, 4))
    every = pieces(got)
    for axis, traffic in got.price.comm.items():
        assert summed(every, axis) == pytest.approx(traffic.bytes), axis
    assert sum(one.count * one.parameters for one in every) == SMALL.workload.parameters
    assert every[1].kept > 0.0


def test_experts_are_inside_their_block() -> None:
    got = answered(SPARSE, "shard=32 ep=8 zero=1")
    _, dense, sparse, own, _ = pieces(got)
    assert (dense.count, sparse.count, own.count, own.inside) == (14, 10, 10, True)
    assert own.parameters == SPARSE.layer_experts and own.active == pytest.approx(own.parameters / 8)
    assert own.active < sparse.active < own.parameters < sparse.parameters
    assert 0.0 < own.flops < sparse.flops and 0.0 < own.kept < sparse.kept
    assert own.sent == {"ep": sparse.sent["ep"]} and dense.sent["ep"] == 0.0
    # Of the products with weights, two operations an element that a token meets.
    assert own.flops == pytest.approx(2 * SPARSE.context * own.active, rel=1e-2)


@pytest.mark.parametrize("made", ["megatron-2022", "plain"])
def test_what_is_kept_is_what_memory_counts(made: str) -> None:
    """One micro-batch in flight, in one stage: stem, blocks and head are all the activations that there are."""
    for plan in ("dp=32", "dp=8 tp=4"):
        got = answered(DENSE, plan, made)
        ask = got.question
        told = sum(one.count * one.kept for one in pieces(got))
        more = kept_of(DENSE, ask.plan, ask.stack, ask.micro_batch).loss
        assert told + more == pytest.approx(got.verdict.memory.activations)


def test_recomputation_keeps_less() -> None:
    none, some, full = (
        pieces(answered(DENSE, f"dp=32 recompute={way}"))[1].kept for way in ("none", "selective", "full")
    )
    assert full < some < none


def test_neighbours_alike_are_one_row() -> None:
    names = [(one.name, one.count) for one in pieces(answered(MODELS["resnet"], "dp=32"))]
    assert [count for _, count in names] == [1, 3, 4, 6, 3, 1]
    assert names[1] == ("blocks.0 to 2", 3)
    names = [(one.name, one.count) for one in pieces(answered(MODELS["dlrm"], "dp=32"))]
    assert names == [(name, 1) for name in ("tables", "bottom", "interaction", "top", "head")]


def test_the_table_and_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--demo", "--plan", "dp=2 pp=2 micros=4"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(one["count"] * one["parameters"] for one in told["blocks"]) == told["parameters"]
    assert main(words) == 0
    assert "part by part" not in capsys.readouterr().out
    assert main([*words, "--blocks"]) == 0
    page = capsys.readouterr().out
    assert "part by part" in page and "GB on dp" in page and "the whole model" in page
    assert main([*words, "--blocks", "--cluster", "dgx-a100:1+dgx-v100:1", "--json"]) == 2
    assert "--blocks" in json.loads(capsys.readouterr().out)["what"]
