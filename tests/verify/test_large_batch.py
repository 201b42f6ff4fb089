"""Large-batch optimisers on four ranks: whatever cuts their matrices, their steps are those of one device."""

from pathlib import Path

import pytest

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

PLANS = (
    "dp=4", "dp=1 micros=8", "shard=4 zero=1", "shard=4 zero=2", "shard=4 zero=3", "tp=4", "pp=4 micros=8",
    "dp=2 shard=2", "tp=2 pp=2 micros=8", "shard=2 tp=2 offload=optimizer", "dp=2 shard=2 sync=canonical",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("optimizer", ["lars", "lamb", "lans", "onebit_lamb"])
def test_every_cut_over_four_ranks_is_proven(tmp_path: Path, optimizer: str) -> None:
    """Of 1-bit LAMB, steps before and after its ratios are frozen; embeddings are tied."""
    text = tmp_path / "some.txt"
    text.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(20_000)))
    more = {"variance_steps": 1} if optimizer == "onebit_lamb" else {}
    recipe = Recipe(
        seed=3,
        model=ModelConfig(n_layer=4, n_head=4, d_model=16, context=8, dropout=0.1, tie_embeddings=True),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(
            steps=4,
            global_batch=8,
            micro_batch=1,
            lr=1e-2,
            optimizer=optimizer,
            dtype="float64",
            clip=0.5,
            **more,
        ),
    )
    proofs = prove(recipe, [Plan.parse(plan) for plan in PLANS], 3)
    assert [(proof.plan, proof.first_divergence) for proof in proofs if not proof.passed] == []
    assert len(proofs) == len(PLANS)
