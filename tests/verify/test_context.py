"""Plans with cp come to what one device comes to: each way, alone and in products, with grouped heads and dropout."""

from pathlib import Path

import pytest

from tests.threads import prove
from tests.train.small import TEXT
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

FEW = ["cp=3", "cp=4 cp_kind=gather", "cp=2 tp=2 cp_kind=ulysses", "cp=2 shard=2 pp=2 recompute=full"]
MORE = [
    *(f"cp={n} cp_kind={kind}" for n in (2, 3, 4) for kind in ("ring", "gather", "ulysses")),
    *(f"cp=2 cp_kind={kind} {more}" for kind in ("ring", "gather", "ulysses")
      for more in ("tp=2", "pp=2", "shard=2 zero=1", "dp=2 sync=canonical", "recompute=selective", "pp=2 schedule=zbv")),
    "cp=3 tp=5", "cp=2 tp=2 pp=2 schedule=dualpipe micros=4", "cp=2 tp=2 shard=2 dp=2",
]  # fmt: skip


def proven(folder: Path, texts: list[str], **model: object) -> None:
    (folder / "text.txt").write_text(TEXT)
    sizes = {"n_layer": 4, "n_head": 24, "d_model": 48, "context": 24, "dropout": 0.1, **model}
    recipe = Recipe(
        model=ModelConfig(**sizes),
        data=DataConfig(source=f"text:{folder / 'text.txt'}"),
        train=TrainConfig(steps=2, global_batch=8, dtype="float64"),
    )
    proofs = prove(recipe, [Plan.parse(text) for text in texts], 2)
    assert [proof.plan for proof in proofs if not proof.passed] == [], proofs


def test_some_plans_are_proven(tmp_path: Path):
    proven(tmp_path, FEW, n_layer=2, n_kv_head=12, positions="rotary")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_plans_are_proven(tmp_path: Path):
    proven(tmp_path, MORE)
    proven(
        tmp_path, [*FEW, *MORE], n_kv_head=12, positions="rotary", norm="rms", activation="swiglu", d_ff=60
    )
