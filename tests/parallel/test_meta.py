"""The way that a step takes on a device, run without one: on the meta device, one rank of a world that is not there.

Wrong devices show as strays, a wait for the device as a wait; each place that may wait is named here.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.comm.imagined import imagined
from unisono.config import DataConfig, ModelConfig, Recipe, Resolved, TrainConfig, resolve
from unisono.train.build.rehearsal import Onlooker, Rehearsed, rehearse
from unisono.train.data.dataset import Corpus, Images, TokenWindows
from unisono.train.data.load import load

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"n_layer": 4, "n_head": 4, "d_model": 16, "context": 8, "dropout": 0.1, "vocab": 24},
    "llama": {"n_layer": 4, "n_head": 4, "d_model": 16, "context": 8, "positions": "rotary", "norm": "rms",
              "activation": "swiglu", "bias": False, "vocab": 24, "tie_embeddings": False},
    "deep": {"n_layer": 6, "n_head": 2, "d_model": 8, "context": 8, "vocab": 24},
    "moe": {"kind": "moe", "n_layer": 2, "n_head": 4, "d_model": 16, "context": 8, "vocab": 24},
    "convnet": {"kind": "convnet", "n_layer": 2, "channels": 8},
    "mlp": {"kind": "mlp", "hidden": (16, 16)},
    "dlrm": {"kind": "dlrm", "d_table": 4, "n_dense": 3, "bottom": (8,), "top": (8,), "tables": (12, 8, 6)},
}  # fmt: skip
# Where a step waits for its device: once for what it comes to, once for whether a gradient lacks. Torch's optimiser
# reads its counters on this device, which has no fused kernel.
MAY_WAIT = {
    "train/step/grad_norm.py in read",
    "train/step/gradients.py in drop_unused",
    "train/step/update.py in clip_and_step",
}
ALSO = {
    "precision=fp16": {"train/step/scaling.py in overflowed", "train/step/scaling.py in says"},
    "dualpipe": {"parallel/mirror.py in add_up"},
    "offload=": {"parallel/offload/streaming.py in _pass"},  # the optimiser's own, for each part
    "ep=": {"train/step/routing.py in balance"},
    "bf16:stochastic": {"train/step/padded_params.py in step"},  # the same
}


def corpus(kind: str) -> Corpus:
    if kind == "dlrm":
        return load(DataConfig(source="clicks:samples=200"), ModelConfig(**MODELS[kind]))
    if kind in ("convnet", "mlp"):
        some = Images(torch.zeros(8, 3, 4, 4), torch.zeros(8, dtype=torch.int64))
        return Corpus(some, some, None, 10, (3, 4, 4), None, None, "")
    tokens = TokenWindows(np.zeros(200, dtype=np.int64), 8)
    return Corpus(tokens, tokens, 24, 24, (8,), None, None, "")


def resolved(kind: str, plan: str) -> Resolved:
    source = "digits" if kind in ("convnet", "mlp") else "clicks" if kind == "dlrm" else "stdlib"  # not read
    recipe = Recipe(
        model=ModelConfig(**MODELS[kind]),
        data=DataConfig(source=source),
        train=TrainConfig(global_batch=8, micro_batch=1, clip=0.5),
    )
    return resolve(recipe, plan, None)


def seen(kind: str, plan: str, rank: int = -1) -> Rehearsed:
    found = resolved(kind, plan)
    rank %= found.plan.world
    with imagined(rank, found.plan.world) as calls:
        return rehearse(found.recipe, found.plan, corpus(kind), rank, calls)


PLANS = [
    ("gpt", "dp=8"),
    ("gpt", "dp=2 tp=2 pp=2 recompute=selective"),
    ("gpt", "dp=4 shard=2 zero=1"),
    ("gpt", "dp=2 pp=2 offload=params:to=disk+activations"),
    ("llama", "dp=2 tp=2 offload=activations recompute=full"),
    ("gpt", "dp=2 shard=2 offload=optimizer"),
    ("gpt", "shard=2 zero=2 pp=2 dp=2"),
    ("llama", "dp=2 shard=2 zero=3 tp=2 precision=bf16"),
    ("gpt", "dp=8 sync=canonical"),
    ("gpt", "dp=4 precision=fp16 recompute=full"),
    ("llama", "cp=2 tp=2 dp=2"),
    ("gpt", "cp=2 cp_kind=ulysses pp=2 dp=2"),
    ("gpt", "pp=2 schedule=interleaved:v=2 dp=4"),
    ("gpt", "pp=2 schedule=zbv dp=4"),
    ("llama", "pp=2 schedule=dualpipe dp=2"),
    ("moe", "shard=2 ep=2 dp=4"),
    ("convnet", "dp=2 shard=2 pp=2"),
    ("mlp", "dp=2 tp=2 pp=2"),
    ("dlrm", "shard=4 ep=2"),
    ("llama", "dp=2 pp=2 tp=2:chunks=2"),
    ("gpt", "dp=2 shard=2 precision=bf16:stochastic"),
    ("gpt", "dp=2 tp=2 precision=bf16:fp8"),
    ("gpt", "pp=2 precision=bf16:params,fp8"),
]


@pytest.mark.parametrize(("kind", "plan"), PLANS, ids=[f"{kind}-{plan}" for kind, plan in PLANS])
def test_nothing_strays_and_nobody_waits_but_where_it_is_said(kind: str, plan: str) -> None:
    found = seen(kind, plan)
    assert not found.strays
    named = MAY_WAIT.union(*(places for word, places in ALSO.items() if word in plan))
    assert set(found.waits) <= named
    assert found.calls and found.peak >= found.lasting > 4 * found.parameters > 0
    assert not dist.is_initialized()


def test_ranks_of_a_stage_hold_and_call_the_same_whatever_the_world() -> None:
    """Of one micro-batch each."""
    few, many = seen("gpt", "tp=2 pp=4 dp=8", rank=3), seen("gpt", "tp=2 pp=4 dp=8", rank=14)
    assert (few.at["pp"], few.at["dp"], many.at["dp"]) == (0, 1, 7)
    assert (few.stages, few.parameters, few.peak) == (many.stages, many.parameters, many.peak)
    assert few.sums() == many.sums()


def test_tables_that_are_dealt_are_looked_up_across_ep() -> None:
    for cut, op in (("table", "all_to_all"), ("row", "reduce_scatter"), ("column", "all_gather")):
        MODELS["dlrm"]["table_sharding"] = cut
        try:
            assert ("ep", op) in seen("dlrm", "shard=4 ep=2").sums()
        finally:
            del MODELS["dlrm"]["table_sharding"]


def test_tokens_travel_to_experts_without_numbers() -> None:
    for plan in ("shard=2 ep=2", "tp=4 ep=2"):
        times, _ = seen("moe", plan).sums()["ep", "all_to_all"]
        assert times == 8 // (2 if "shard" in plan else 1) * 2 * (1 + 2 + 2)  # leaves, layers, sizes and rows
    assert ("cut", "all_gather") in seen("moe", "tp=4 ep=2").sums()


def test_a_wait_and_a_stray_are_seen() -> None:
    watching = Onlooker()
    with watching:
        watching.stepping = True
        assert torch.zeros(3, device="meta").sum().item() == 0.0
        assert torch.zeros(3, device="meta").tolist() == [0.0] * 3
        torch.ones(2, 2)
        watching.stepping = False
    assert sum(watching.waits.values()) == 2 and sum(watching.strays.values()) == 1


def test_bytes_that_live_are_counted_once_and_forgotten() -> None:
    with Onlooker() as watching:
        x = torch.empty(100, dtype=torch.float64, device="meta")
        y = x.view(10, 10) + 1.0
        assert watching.now == 1600
        del y
        assert (watching.now, watching.peak) == (800, 1600)
        del x
        assert watching.now == 0


MANY_STAGES = [
    *((kind, plan) for kind, plan in PLANS if "pp=" in plan),
    ("gpt", "pp=4"),
    ("gpt", "dp=2 pp=3"),
    ("deep", "pp=3 schedule=dualpipev"),
]


@pytest.mark.parametrize(("kind", "plan"), MANY_STAGES)
def test_the_members_of_a_group_meet_under_one_name(kind: str, plan: str) -> None:
    """torch names a group after its members and after how many groups a rank has by then: so must the next one be."""
    found, names, counts = resolved(kind, plan), dict[tuple[str, int], list[int]](), set[int]()
    for rank in range(found.plan.world):
        with imagined(rank, found.plan.world) as calls:
            rehearse(found.recipe, found.plan, corpus(kind), rank, calls)
            for pg, name in c10d._world.pg_names.items():
                names[name, rank] = dist.get_process_group_ranks(pg)
            counts.add(len(c10d._world.pg_names))
    for (name, rank), members in names.items():
        assert all(names.get((name, member)) == members for member in members), (rank, members)
    assert len(counts) == 1
