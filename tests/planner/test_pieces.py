"""The workload piece by piece: pieces add up to the model and to the price's own traffic, for every kind of model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.published import gpt
from unisono.cli import main
from unisono.models.convnet import convnet
from unisono.models.convnet.resnet import resnet
from unisono.models.dlrm import dlrm
from unisono.models.mlp import mlp
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.memory import kept_of
from unisono.planner.pieces import pieces
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
PLANS = ("dp=32", "dp=2 shard=16 zero=3", "dp=4 tp=8", "shard=32 ep=8 zero=1", "dp=8 tp=4 recompute=auto")  # fmt: skip


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


@pytest.mark.parametrize(("model", "plan"), cases())
def test_pieces_add_up_to_the_model(model: Model, plan: str) -> None:
    beside = [one for one in pieces(answered(model, plan)) if not one.inside]
    work = model.workload
    assert sum(one.count * one.parameters for one in beside) == pytest.approx(work.parameters)
    assert sum(one.count * one.active for one in beside) == pytest.approx(work.active)
    assert sum(one.count * one.flops for one in beside) == pytest.approx(work.flops)


def test_experts_are_inside_their_block() -> None:
    got = answered(SPARSE, "shard=32 ep=8 zero=1")
    _, dense, sparse, own, _ = pieces(got)
    assert (dense.count, sparse.count, own.count, own.inside) == (14, 10, 10, True)
    assert own.parameters == SPARSE.layer_experts and own.active == pytest.approx(own.parameters / 8)
    assert own.active < sparse.active < own.parameters < sparse.parameters
    assert 0.0 < own.flops < sparse.flops and 0.0 < own.kept < sparse.kept
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
    assert "part by part" in page and "MiB" in page and "the whole model" in page
    assert main([*words, "--blocks", "--cluster", "dgx-a100:1+dgx-v100:1", "--json"]) == 2
    assert "--blocks" in json.loads(capsys.readouterr().out)["what"]
