"""Ranges of blocks that are played otherwise than the rest: against one device, and held to what they say."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.ranks import World
from tests.threads import prove
from tests.train.small import recipe, started
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

QUICK = (
    "pp=2 micros=8 blocks=1-2:recompute=full;3:recompute=selective,offload=optimizer",
    "shard=2 zero=1 blocks=1-2:zero=3,recompute=full;3:zero=2",
    "tp=2 blocks=1-2:tp=1",
)
PLANS = (
    "blocks=0:offload=params:to=disk;2-3:offload=activations:to=disk",
    "offload=params blocks=1-2:offload=none",
    "shard=2 zero=3 blocks=0-1:zero=2;2:zero=1",
    "dp=2 shard=2 zero=2 blocks=2-3:zero=3,offload=optimizer",
    "shard=2 cp=2 zero=3 blocks=1-2:zero=1",
    "shard=2 pp=2 zero=3 micros=4 blocks=1-2:zero=2",
    "dp=2 sync=canonical blocks=0-2:recompute=full,offload=params",
    "shard=2 sync=canonical zero=3 blocks=1:zero=1;2:zero=2",
    "pp=2 schedule=interleaved:v=2 micros=8 blocks=0:recompute=full;1-2:offload=optimizer",
    "pp=2 schedule=zb1p micros=8 blocks=0-2:recompute=selective",
    "tp=2 shard=2 zero=2 blocks=0-1:tp=1,zero=3;3:recompute=full",
    "tp=2 cp=2 blocks=0:tp=1;2:tp=1,recompute=full",
    "tp=2 shard=2 cp=2 cp_kind=ulysses blocks=1-2:tp=1",
    "tp=4 dp=2 blocks=0-2:tp=1,recompute=selective",
    "tp=2 pp=2 schedule=zb1p micros=8 blocks=1-2:tp=1",
    "tp=2 blocks=0-3:tp=1,offload=params",
)
MODEL = ModelConfig(kind="gpt", n_layer=4, n_head=4, d_model=16, context=16, dropout=0.1)
TRAIN = TrainConfig(
    steps=3, global_batch=8, micro_batch=1, lr=1e-2, warmup_steps=1, clip=0.5, dtype="float64"
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", [*QUICK, *(pytest.param(text, marks=pytest.mark.slow) for text in PLANS)])
def test_ranges_are_one_device(text: str) -> None:
    plan = Plan.parse(f"{text} precision=fp64")
    (proof,) = prove(Recipe(seed=3, model=MODEL, train=TRAIN), [plan], steps=2)
    assert proof.passed, proof


def dealt(ctx: Any, told: Any, plan: str) -> list[bool]:
    run, _, _ = started(ctx, told, plan)
    (stage,) = run.local.stages.values()
    blocks = [block for block in stage.blocks.values() if isinstance(block, FSDPModule)]
    groups = [block._get_fsdp_state()._fsdp_param_group for block in blocks]
    return [group is not None and group.post_forward_mesh_info is not None for group in groups]


def test_a_range_keeps_its_parameters_gathered(threads: World, tmp_path: Path) -> None:
    told = recipe(tmp_path)
    for rank in threads(dealt, 2, told=told, plan="shard=2 zero=3 blocks=1:zero=2"):
        assert rank == [True, False]


def widths(ctx: Any, told: Any, plan: str) -> dict[str, tuple[int, ...]]:
    run, _, _ = started(ctx, told, plan)
    return {slot.name: tuple(slot.master.shape) for slot in run.local.slots}


def test_a_range_is_whole_under_tp(threads: World, tmp_path: Path) -> None:
    whole, *_ = threads(widths, 1, group=False, told=recipe(tmp_path), plan="dp=1")
    for rank in threads(widths, 2, told=recipe(tmp_path), plan="tp=2 blocks=1:tp=1"):
        same = {name for name in whole if rank[name] == whole[name]}
        assert all(name in same for name in whole if name.startswith("blocks.1."))
        assert not any(f"blocks.0.{part}.weight" in same for part in ("attn.qkv", "mlp.up", "mlp.down"))
