"""GPT: causal, initialised by name, tied where asked; its variants run."""

import pytest
import torch

from unisono.models.gpt import GPTConfig
from unisono.models.gpt.net import GPT
from unisono.models.init import initialise
from unisono.models.noise import Noise, name_sites


def small(**changes):
    given = {"vocab": 31, "n_layer": 2, "n_head": 4, "d_model": 16, "context": 8, **changes}
    model = GPT(GPTConfig(**given)).double()
    name_sites(model)
    initialise(model, seed=1)
    return model


VARIANTS = [
    {},
    {"tie_embeddings": False},
    {"positions": "rotary", "activation": "swiglu", "norm": "rms", "bias": False, "n_kv_head": 2},
    {"n_kv_head": 1},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_position_sees_only_what_came_before(changes):
    model = small(**changes)
    tokens = torch.randint(0, 31, (2, 8))
    later = tokens.clone()
    later[:, 5:] = (later[:, 5:] + 1) % 31
    assert torch.equal(model(tokens)[:, :5], model(later)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(later)[:, 5:])


@pytest.mark.parametrize("changes", VARIANTS)
def test_explicit_attention_with_dropout_equals_the_fused_kernel_without(changes):
    model = small(**changes, dropout=1e-12)  # drops nothing, takes the other path
    tokens = torch.randint(0, 31, (3, 8))
    noisy = model(tokens, Noise(0, torch.arange(3)))
    torch.testing.assert_close(noisy, model(tokens), rtol=1e-9, atol=1e-12)


def test_weights_come_from_seed_and_name_alone():
    deep, shallow = small(n_layer=3), small(n_layer=2)
    for name, weight in shallow.state_dict().items():
        if name.endswith(("proj.weight", "down.weight")):
            continue  # their scale depends on the depth
        assert torch.equal(weight, deep.state_dict()[name]), name


def test_no_two_layers_begin_alike():
    drawn = [x for x in small(n_layer=3, tie_embeddings=False).parameters() if x.dim() > 1]
    assert len({tuple(x.flatten()[:4].tolist()) for x in drawn}) == len(drawn)


def test_initialisation_is_gpt2s():
    model = GPT(GPTConfig(vocab=512, n_layer=2, n_head=4, d_model=128))
    initialise(model, seed=0)
    assert abs(model.stem.tok.weight.std().item() - 0.02) < 1e-3
    assert abs(model.blocks[0].mlp.down.weight.std().item() - 0.02 / 2) < 1e-3
    assert not model.blocks[0].attn.qkv.bias.any() and (model.head.norm.weight == 1).all()


def test_tied_weights_are_one():
    model = small()
    assert model.head.out.weight is model.stem.tok.weight
    assert small(tie_embeddings=False).head.out.weight is not model.stem.tok.weight


def test_loss_is_a_sum():
    model, tokens = small(), torch.randint(0, 31, (2, 8))
    logits = model(tokens)
    parts = sum(model.loss(logits[i : i + 1], tokens[i : i + 1]) for i in range(2))
    torch.testing.assert_close(model.loss(logits, tokens), parts)
