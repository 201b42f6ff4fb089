"""Batches that follow the noise scale: every plan decides as one device does, step by step and after a resume."""

from pathlib import Path

import pytest

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono_contrib.config.sections.noise_scale import NoiseScaleConfig
from unisono_contrib.config.sections.ramp import RampConfig

GPT_PLANS = ("dp=2", "shard=2 zero=1", "shard=2 zero=3", "tp=2", "shard=2 tp=2", "dp=2 shard=2")


def proven(folder: Path, kind: str, plans: tuple[str, ...], steps: int) -> None:
    text = folder / "some.txt"
    text.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(20_000)))
    gpt = ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1, tie_embeddings=True)
    mlp = kind == "mlp"
    recipe = Recipe(
        seed=3,
        model=ModelConfig(kind="mlp") if mlp else gpt,
        data=DataConfig(source="digits" if mlp else f"text:{text}"),
        train=TrainConfig(steps=8, global_batch=16, micro_batch=2, lr=1e-2, dtype="float64"),
        ramp=RampConfig(by="noise_scale", first=4, growth=4, every=1),  # type: ignore[call-arg]
        noise_scale=NoiseScaleConfig(smoothing=0.5),  # type: ignore[call-arg]
    )
    proofs = prove(recipe, [Plan.parse(plan) for plan in plans], steps)
    assert [(proof.plan, proof.first_divergence) for proof in proofs if not proof.passed] == []
    assert len(proofs) == len(plans)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_decisions_are_those_of_one_device(tmp_path: Path) -> None:
    """An MLP on digits, whose batch grows in these steps."""
    proven(tmp_path, "mlp", ("dp=2", "pp=2 micros=8"), 3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_also_where_a_gpt_is_cut(tmp_path: Path) -> None:
    proven(tmp_path, "gpt", GPT_PLANS, 4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_adascale_under_shard_and_tp(tmp_path: Path) -> None:
    """Its learning rate follows the noise scale."""
    text = tmp_path / "some.txt"
    text.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(20_000)))
    recipe = Recipe(
        seed=3,
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1, tie_embeddings=True),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(
            steps=8, global_batch=8, micro_batch=1, lr=1e-2, dtype="float64", optimizer="adascale"
        ),
    )
    plans = ["dp=2", "shard=2 zero=2", "tp=2", "shard=2 tp=2 zero=3"]
    proofs = prove(recipe, [Plan.parse(plan) for plan in plans], 3)
    assert [(proof.plan, proof.first_divergence) for proof in proofs if not proof.passed] == []
