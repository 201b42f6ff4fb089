"""Packed chats with a loss over the answers: every plan comes to what one device comes to."""

from pathlib import Path

import pytest

from tests.threads import prove
from tests.train.data.chats import chats
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

FEW = ["dp=3", "tp=2 pp=2", "cp=2"]
MORE = [
    "dp=2 micros=3", "shard=3 zero=1", "shard=2 pp=2", "cp=3 cp_kind=gather", "cp=2 tp=2 cp_kind=ulysses", "tp=2x2",
    "dp=2 sync=canonical", "cp=2 tp=2 sync=canonical:shards=4", "pp=2 schedule=zbv recompute=full",
    "cp=4 recompute=selective", "tp=3 cp=2 pp=2", "dp=2 tp=2 recompute=full",
]  # fmt: skip


def proven(
    folder: Path, texts: list[str], packing: str = "auto", train: dict | None = None, **model: object
) -> None:
    sizes = {"n_layer": 2, "n_head": 4, "d_model": 16, "context": 48, "dropout": 0.1, **model}
    recipe = Recipe(
        model=ModelConfig(**sizes),
        data=DataConfig(source=chats(folder / "a.jsonl", 60), cache=str(folder / "cache"), packing=packing),
        train=TrainConfig(steps=2, global_batch=6, dtype="float64", metrics=("accuracy",), **(train or {})),
    )
    proofs = prove(recipe, [Plan.parse(text) for text in texts], 2)
    assert [proof.plan for proof in proofs if not proof.passed] == [], proofs


def test_some_plans_are_proven(tmp_path: Path):
    proven(tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_plans_are_proven(tmp_path: Path):
    proven(tmp_path, MORE, n_layer=4, n_head=12, d_model=48)
    rotary = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "n_kv_head": 4}
    proven(tmp_path, [*FEW, *MORE], n_layer=4, n_head=12, d_model=48, **rotary)
    proven(tmp_path, FEW, "none")
    proven(tmp_path, ["pp=2 schedule=pipedream micros=6"], train={"clip": 0.0})
    proven(tmp_path, ["dp=3", "tp=2 pp=2"], n_layer=2, kind="moe", n_experts=4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_adapters_are_proven(tmp_path: Path):
    proven(tmp_path, FEW, train={"lora_rank": 4})
