"""Optimisers of large batches and of whole matrices on four ranks: whatever cuts their matrices, their steps are those of one device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan

PLANS = (
    "dp=4", "dp=1 micros=8", "shard=4 zero=1", "shard=4 zero=2", "shard=4 zero=3", "tp=4", "pp=4 micros=8",
    "dp=2 shard=2", "tp=2 pp=2 micros=8", "shard=2 tp=2 offload=optimizer", "dp=2 shard=2 sync=canonical",
)  # fmt: skip


WHOLE_MATRICES = (*PLANS[:9], "shard=2 cp=2", "pp=2 micros=8 schedule=zb1p", "dp=2 tp=2 recompute=full")


def faults(folder: Path, optimizer: str, plans: Sequence[str], **more: Any) -> list[tuple[str, str | None]]:
    """What no proof of these plans holds, for a GPT of four blocks in float64 whose embeddings are tied."""
    text = folder / "some.txt"
    text.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(20_000)))
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
    proofs = prove(recipe, [Plan.parse(plan) for plan in plans], 3)
    assert len(proofs) == len(plans)
    return [(str(proof.plan), proof.first_divergence) for proof in proofs if not proof.passed]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("optimizer", ["lars", "lamb", "lans", "onebit_lamb"])
def test_every_cut_over_four_ranks_is_proven(tmp_path: Path, optimizer: str) -> None:
    """Of 1-bit LAMB, steps before and after its ratios are frozen."""
    more = {"variance_steps": 1} if optimizer == "onebit_lamb" else {}
    assert faults(tmp_path, optimizer, PLANS, **more) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("optimizer", ["kfac", "muon", "shampoo", "soap"])
def test_every_cut_of_whole_matrices_over_four_ranks_is_proven(tmp_path: Path, optimizer: str) -> None:
    """A decomposition in the third step goes on from means and follows a step without one."""
    more = {} if optimizer == "muon" else {"curvature_interval": 2}
    assert faults(tmp_path, optimizer, WHOLE_MATRICES, **more) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_layers_behind_weights_that_do_not_learn_are_proven(tmp_path: Path) -> None:
    """What the adapters of the first block read never moves, so nothing but rounding of its own tells it apart."""
    assert faults(tmp_path, "kfac", ("tp=2", "shard=2"), lora_rank=3) == []
