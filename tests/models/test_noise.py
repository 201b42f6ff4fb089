"""Dropout: a pure function of seed, sample, site and element; fair; the same in slices as in the whole."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.models.build import build
from unisono.models.noise import Dropout, Noise, site_of
from unisono.spec.layout import Places
from unisono.spec.model import Facts, ModelConfig


def mask(shape, seed=0, first=0, site=1, places=None):
    drop = Dropout(0.5, site)
    drop.places = places or {}
    return drop.bits(torch.Size(shape), Noise(seed, torch.arange(first, first + shape[0])))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(2, 6), st.integers(2, 6), st.integers(1, 8), st.data())
def test_a_slice_sees_its_part_of_the_whole(batch, a, b, c, data):
    whole = mask((batch, a, b, c))
    lo = data.draw(st.integers(0, a - 1))
    hi = data.draw(st.integers(lo + 1, a))
    part = mask((batch, hi - lo, b, c), places={1: Places.whole(a).part(lo, hi - lo)})
    assert torch.equal(part, whole[:, lo:hi])


@given(st.integers(0, 2**40))
@settings(deadline=None)
def test_a_sample_has_its_mask_whoever_its_neighbours_are(first):
    both = mask((2, 5, 7), first=first)
    assert torch.equal(mask((1, 5, 7), first=first + 1), both[1:])


def test_seed_sample_and_site_each_change_the_mask():
    base = mask((1, 64, 64))
    for other in (mask((1, 64, 64), seed=1), mask((1, 64, 64), first=1), mask((1, 64, 64), site=2)):
        equal = (base == other).float().mean().item()
        assert equal < 0.01


def test_bits_are_fair_and_uncorrelated():
    bits = mask((64, 128, 64)).double() / 2**32
    assert abs(bits.mean().item() - 0.5) < 2e-3
    assert abs(bits.var().item() - 1 / 12) < 1e-3
    kept = (bits >= 0.1).double() - 0.9
    for dim in range(3):
        a, b = kept.narrow(dim, 0, kept.shape[dim] - 1), kept.narrow(dim, 1, kept.shape[dim] - 1)
        assert abs((a * b).mean().item()) / 0.09 < 0.01


def test_scaling_keeps_the_mean_and_no_noise_means_no_dropout():
    drop, x = Dropout(0.25, site_of("x")), torch.ones(8, 64, 64)
    assert drop(x, None) is x
    y = drop(x, Noise(0, torch.arange(8)))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(y.mean().item() - 1.0) < 0.02


def test_each_dropout_of_a_model_has_a_mask_of_its_own():
    model = build(
        ModelConfig(n_layer=3, n_head=2, d_model=16, context=8, vocab=31, dropout=0.5), Facts(), "cpu"
    )
    drops = [module for module in model.modules() if isinstance(module, Dropout)]
    noise = Noise(1, torch.arange(2))
    masks = [drop.mask(torch.Size((2, 8, 16)), noise, torch.float32) for drop in drops]
    assert len(drops) == 10 and all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
