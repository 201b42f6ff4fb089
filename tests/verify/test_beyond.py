"""What a proof says besides right and wrong, and what it plays besides steps."""

from pathlib import Path

import pytest
import torch

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.models.noise import Dropout
from unisono.plan import Plan
from unisono.verify.bounds import BoundTerms, bounds_of
from unisono.verify.judge import torch_dropouts
from unisono.verify.prover import Proof
from unisono.verify.stretch import _odd_epochs

pytestmark = pytest.mark.timeout(120)

MODEL = """
import torch
from torch import nn
from unisono.spec.layout import Anatomy


class Stem(nn.Embedding):
    def forward(self, x, noise=None):
        return super().forward(x)


class Block(nn.Sequential):
    def forward(self, x, noise=None):
        return super().forward(x)


class Own(nn.Module):
    def __init__(self, vocab, reduction, drop):
        super().__init__()
        self.stem = Stem(vocab, 8)
        self.blocks = nn.ModuleList([Block(nn.Linear(8, 8), nn.Dropout(drop))])
        self.head = nn.Linear(8, vocab)
        self.anatomy, self.reduction = Anatomy(), reduction

    def forward(self, x):
        return self.head(self.blocks[0](self.stem(x)))

    def loss(self, y, targets):
        return nn.functional.cross_entropy(y.flatten(0, -2), targets.flatten(), reduction=self.reduction)


def right(vocab, context):
    return Own(vocab, "sum", 0.0)


def mean(vocab, context):
    return Own(vocab, "mean", 0.0)


def dropping(vocab, context):
    return Own(vocab, "sum", 0.3)
"""


@pytest.fixture
def proved(tmp_path: Path):
    """One proof of a recipe."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    (tmp_path / "own.py").write_text(MODEL)

    def proof(plan: str, dtype: str = "float64", **model: object) -> Proof:
        if "kind" in model:
            model["kind"] = f"{tmp_path / 'own.py'}:{model['kind']}"
        else:
            model |= {"n_layer": 2, "n_head": 2, "d_model": 16}
        recipe = Recipe(
            model=ModelConfig(context=8, **model),
            data=DataConfig(source=f"text:{tmp_path / 'text.txt'}"),
            train=TrainConfig(steps=6, global_batch=8, micro_batch=1, dtype=dtype),  # type: ignore[arg-type]
        )
        (made,) = prove(recipe, [Plan.parse(plan)], steps=1)
        return made

    return proof


def test_a_bound_that_has_room_for_half_a_micro_batch_shows_nothing():
    sizes = BoundTerms(path=1000, rounded=30, elements=10_000, tokens=64, leaves=8)
    wide = {text: bounds_of(Plan.parse(text), sizes).shows_nothing(8) for text in (
        "tp=2 precision=bf16", "tp=2", "dp=2 precision=bf16", "tp=2 precision=fp64",
    )}  # fmt: skip
    assert [text for text, nothing in wide.items() if nothing] == ["tp=2 precision=bf16"]


def test_such_a_plan_is_unproven_and_not_passed(proved):
    proof = proved("tp=2 precision=bf16", "float32")
    assert (proof.verdict, proof.passed, proof.first_divergence) == ("unproven", False, None)
    assert proof.cause == "bound_too_wide" and "--dtype float64" in (proof.explanation or "")
    assert proof.as_dict()["pass"] is False and proof.as_dict()["verdict"] == "unproven"


def test_tokens_that_no_proof_has_met_are_told_where_tp_cuts_them(proved):
    unseen = [note for note in proved("tp=2").notes if "tokens of the vocabulary" in note]
    assert len(unseen) == 1 and 230 < int(unseen[0].split()[0]) < 256
    assert not proved("dp=2").notes


def test_bits_that_need_one_thread_are_told(proved):
    assert any("threads_per_rank 1" in note for note in proved("pp=2").notes)
    assert not proved("dp=2 sync=canonical").notes


def test_a_loss_that_is_a_mean_is_told(proved):
    assert "a sum over targets" in proved("dp=2", kind="mean").notes[0]
    assert proved("dp=2", kind="right").passed and not proved("dp=2", kind="right").notes


def test_torchs_own_dropout_is_named(proved):
    proof = proved("dp=2", kind="dropping")
    assert proof.cause == "masks_differ"
    assert "blocks.0.1" in (proof.explanation or "") and "noise.Dropout" in (proof.explanation or "")
    assert torch_dropouts(torch.nn.Sequential(torch.nn.Dropout(0.0), Dropout(0.5))) == []


@pytest.mark.parametrize(("seed", "batch", "micro"), [(0, 8, 2), (3, 1, 1), (7, 12, 4)])
def test_epochs_are_in_order(seed: int, batch: int, micro: int):
    assert _odd_epochs(seed, batch, micro) == ""
