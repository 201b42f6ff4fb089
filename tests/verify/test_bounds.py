"""Bounds follow from arithmetic: zero where no sum changes, growing with the roundoff and the length of sums."""

import pytest
import torch

from unisono.codecs.plain import Plain
from unisono.config import TrainConfig
from unisono.models.gpt import GPTConfig
from unisono.models.gpt.net import GPT
from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.spec.fidelity import Fidelity
from unisono.verify.bounds import Bounds, BoundTerms, bounds_of
from unisono.verify.laws import clip_factor, update
from unisono.verify.path import path_of

SIZES = BoundTerms(path=1000, rounded=30, elements=10_000, tokens=64, leaves=8)


def bounds(text: str, sizes: BoundTerms = SIZES) -> Bounds:
    return bounds_of(Plan.parse(text), sizes)


@pytest.mark.parametrize(
    "text", ["pp=2", "recompute=full", "dp=2 sync=canonical", "shard=2 pp=2 sync=canonical"]
)
def test_plans_that_change_no_sum_are_held_to_zero(text: str):
    assert bounds(text).grad == bounds(text).loss == 0.0


class Halved(Plain):
    """Sends a half."""

    name = "halved"
    fidelity, error = Fidelity.LOSSY, 0.5


def test_fidelity_is_what_policy_and_codec_declare():
    own = Plan.parse(f"dp=2 codec={__file__}:Halved")
    assert [fidelity_of(Plan.parse(text)) for text in ("dp=2", "dp=2 sync=canonical", "dp=2 tp=2 sync=canonical")] == [
        Fidelity.ROUNDING, Fidelity.EXACT, Fidelity.ROUNDING,
    ]  # fmt: skip
    assert fidelity_of(own) is Fidelity.LOSSY
    assert bounds_of(own, SIZES).grad > 0.5


def test_replicas_change_no_loss_of_a_micro_batch():
    assert bounds("dp=2").loss == 0.0 < bounds("dp=2").grad
    assert bounds("tp=2").loss > 0.0


def test_a_bound_scales_with_the_roundoff():
    assert bounds("dp=2").grad / bounds("dp=2 precision=fp64").grad == pytest.approx(2.0**29)
    assert bounds("dp=2 precision=bf16").grad == bounds("dp=2").grad  # no sum inside a micro-batch changes
    assert bounds("tp=2 precision=bf16").grad > bounds("tp=2").grad


def test_in_float64_a_billionth_is_far_outside_even_for_a_large_model():
    large = BoundTerms(path=2_000_000, rounded=2000, elements=10**10, tokens=1 << 20, leaves=1 << 10)
    assert bounds("dp=8 precision=fp64", large).grad < 1e-10
    assert bounds("tp=2 precision=fp64").grad < 1e-12


def test_sums_in_another_order_stay_within_the_bound_of_one_sum():
    torch.manual_seed(0)
    for terms in (100, 10_000):
        x = torch.randn(200, terms, dtype=torch.float32)
        gap = (x.double().sum(1) - torch.stack([row.cumsum(0)[-1] for row in x]).double()).abs()
        bound = Bounds(0.0, 0.0, 2.0**-24, 8.0).total(terms)
        assert bool((gap <= bound * x.abs().double().sum(1)).all())


def test_the_path_grows_with_depth_width_and_context():
    def of(**changed: int) -> int:
        sizes = {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "vocab": 32}
        return path_of(GPT(GPTConfig(**{**sizes, **changed})))[0]

    base = of()
    assert of(n_layer=4) > base and of(d_model=32) > base and of(context=16) > base and of(vocab=64) > base


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_formula_is_the_optimisers_and_its_bound_holds(optimizer: str):
    torch.manual_seed(1)
    train = TrainConfig(optimizer=optimizer, weight_decay=0.1)
    p = torch.nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    made = (
        torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1)
        if optimizer == "sgd"
        else torch.optim.AdamW([p], lr=0.1, betas=train.betas, eps=train.eps, weight_decay=0.1)
    )
    p.grad = torch.randn_like(p)
    made.step()
    state = {k: v.clone() for k, v in made.state[p].items()}
    start, grad = p.detach().clone(), torch.randn_like(p)
    p.grad = grad + 1e-6 * torch.randn_like(p).clamp(-1, 1)
    made.step()
    sizes = {"lr": 0.1, "step": 1, "unit": 2.0**-53}
    right = update(train, start, state, p.grad, 0.0, **sizes)
    near = update(train, start, state, grad, 1e-6, **sizes)
    for key, got in (("param", p.detach()), *made.state[p].items()):
        value, room = right[key]
        assert bool(((got - value).abs() <= room).all()), key
        assert key == "step" or room.max() < 1e-12
        value, room = near[key]
        assert bool(((got - value).abs() <= room).all()), key


def test_clipping_scales_by_the_norm_of_the_whole():
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(0.5, 1.0) == clip_factor(9.0, 0.0) == 1.0
