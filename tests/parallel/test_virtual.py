"""Layers by virtual shards: the bits do not depend on how many ranks hold them."""

import pytest
import torch

from tests.threads import prove
from unisono.comm.group import Group
from unisono.config import ModelConfig, Recipe, TrainConfig, resolve
from unisono.models.build import build
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.model import Facts
from unisono_contrib.parallel.virtual.attention import VirtualCore
from unisono_contrib.parallel.virtual.build import _check_weightless
from unisono_contrib.parallel.virtual.deal import VirtualDeal

pytestmark = pytest.mark.timeout(300)

FEW = ["tp=2 cp=2"]
MORE = ["tp=2", "tp=4", "cp=2", "cp=4", "tp=2 pp=2", "dp=2 tp=2", "shard=2 tp=2", "shard=2 cp=2"]


def recipe(**model):
    given = {
        "n_layer": 2,
        "n_head": 4,
        "d_model": 16,
        "context": 16,
        "dropout": 0.1,
        "vocab": 258,
        "d_ff": 30,
    }
    train = {"steps": 3, "global_batch": 8, "micro_batch": 2, "lr": 1e-2, "warmup_steps": 2, "clip": 0.5}
    train["lora_rank"] = model.pop("lora_rank", 0)
    return Recipe(seed=3, model=ModelConfig(**{**given, **model}), train=TrainConfig(**train))


def proven(recipe, texts, steps=2):
    plans = [Plan.parse(f"{text} sync=canonical:shards=4") for text in texts]
    for proof in prove(recipe, plans, steps=steps):
        assert proof.fidelity == "EXACT" and proof.bit_identical and proof.passed, proof


def test_weights_are_the_same_bits_however_layers_are_cut():
    proven(recipe(), FEW)


def test_so_are_those_of_adapters_of_which_tp_leaves_a_half_whole():
    proven(recipe(lora_rank=2, n_layer=1), ["cp=2", "tp=2 cp=2"], steps=1)


def test_a_layer_that_nobody_knows_is_refused():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(4))

    with pytest.raises(UsageError, match=r"Scaled, whose weight is blocks\.0\.scale\.gain"):
        _check_weightless("blocks.0.scale", Scaled())


@pytest.mark.slow
def test_weights_are_the_same_bits_under_every_cut():
    proven(recipe(), MORE)


@pytest.mark.slow
def test_so_are_those_of_a_llama_that_recomputes():
    llama = {
        "positions": "rotary",
        "norm": "rms",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
    }
    proven(recipe(**llama), ["tp=2 cp=2 recompute=full", "tp=4"])


def test_attention_by_virtual_shards_is_the_models_own_to_rounding():
    model = build(recipe(n_head=8, n_kv_head=4).model, Facts(), seed=0)
    core = model.blocks[0].attn.core
    one = Group("tp", [0], 0, None, Recorder(0))
    q, k, v = (torch.randn(2, heads, 16, 4, dtype=torch.float64) for heads in (8, 4, 4))
    made = VirtualCore(core.drop, VirtualDeal(4, one, one), 8)(q, k, v, None)
    torch.testing.assert_close(made, core(q, k, v, None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("tp=3 sync=canonical:shards=4", "split evenly over tp=3"),
        ("tp=2 sync=canonical:shards=3", "a power of two"),
        ("tp=2 sync=canonical:shards=8", "do not divide the heads 4"),
    ],
)
def test_what_cannot_be_dealt_is_refused(plan, says):
    with pytest.raises(ConfigProblems, match=says):
        resolve(recipe(), Plan.parse(plan))
