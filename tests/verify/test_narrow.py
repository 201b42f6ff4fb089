"""Weights that a model's own code reads in float32 are held to float32, and nothing else is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.hf.families import written
from tests.threads import prove
from tests.verify.mutations.entry import CATALOGUE
from tests.verify.mutations.proving import prove_with
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.models.build import build
from unisono.plan import Plan
from unisono.spec.model import Facts
from unisono.verify.path import read_in_float32

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(120)
TEXT = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "


def narrow(kind: str) -> frozenset[str]:
    model = build(ModelConfig(kind=kind, context=16), Facts(vocab=256))
    return read_in_float32(model, torch.zeros(1, 16, dtype=torch.int64, device="meta"))


def test_they_are_found_by_what_the_model_does(tmp_path: Path) -> None:
    """Llama's norms compute in float32 too, and multiply by their weight in its own dtype."""
    found = {family: narrow(f"hf:{written(family, tmp_path / family)}") for family in ("gemma2", "llama")}
    assert not found["llama"] and not narrow("gpt")
    assert len(found["gemma2"]) == 9 and all("norm" in name for name in found["gemma2"])


@pytest.mark.parametrize(
    ("family", "plan"),
    [("gemma2", "tp=2"), *(pytest.param(f, p, marks=pytest.mark.slow) for f, p in (("gemma2", "cp=2"), ("gemma3_text", "tp=2"), ("gemma3_text", "cp=2 dp=2")))],
)  # fmt: skip
def test_a_model_that_does_so_is_proven_in_float64(family: str, plan: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 8)
    recipe = Recipe(
        seed=7,
        model=ModelConfig(kind=f"hf:{written(family, tmp_path / family)}"),
        data=DataConfig(source=f"text:{tmp_path / 'text.txt'}"),
        train=TrainConfig(steps=6, global_batch=4, micro_batch=1, dtype="float64", clip=0.5, warmup_steps=1),
    )
    (proof,) = prove(recipe, [Plan.parse(f"{plan} precision=fp64")], 1)
    assert proof.passed, proof
    assert 1e-9 < proof.max_rel_err["grad"] < 1e-6 and proof.bound < 1e-11
    assert any("in float32" in note for note in proof.notes)


def test_a_bug_in_them_is_found_and_so_is_a_small_one_elsewhere(tmp_path: Path) -> None:
    kind = f"hf:{written('gemma2', tmp_path / 'gemma2')}"
    bugs = [
        replace(CATALOGUE[name], plan="tp=2 precision=fp64", dropout=0.0, text=TEXT, recipe={"model.kind": kind})
        for name in ("norm_gradients_not_summed_over_tp", "one_element_off_by_a_billionth")
    ]  # fmt: skip
    for name, found in prove_with(bugs).items():
        assert found.caught and found.step == 1, (name, found)
