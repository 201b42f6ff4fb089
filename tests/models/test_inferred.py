"""Plain modules along their graph: the same function, cut where little crosses, with what can be dealt found."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models.foreign import (
    PLACES,
    TOKENS,
    Branching,
    Encoder,
    GatedMixer,
    HandAttention,
    Pair,
    Smoothed,
    UNet,
    resnet,
)
from unisono.models.batch_norm import LeafNorm
from unisono.models.cut_chain import InferredChain, folded, unfolded
from unisono.models.noise import Noise
from unisono.models.plain import UserModel, one_input
from unisono.spec.errors import UserCodeError
from unisono_contrib.models.cutting import cut_model

WORDS, PICTURE = torch.zeros(1, PLACES, dtype=torch.int64), torch.zeros(1, 1, 8, 8)


def batch(sample: Tensor, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    if sample.is_floating_point():
        return torch.randn(3, *sample.shape[1:], generator=draw, dtype=dtype)
    return torch.randint(TOKENS, (3, *sample.shape[1:]), generator=draw)


def cut(module: nn.Module, sample: Tensor) -> InferredChain:
    chain = cut_model(UserModel(copy.deepcopy(module)), sample)
    assert isinstance(chain, InferredChain), chain.anatomy.whole
    return chain


@pytest.mark.parametrize(
    ("module", "sample", "units", "dealt"),
    [
        (GatedMixer(), WORDS, 4, {"up.weight", "down.weight", "over.weight", "back.weight"}),
        (HandAttention(), WORDS, 6, {"bias", "layers.1.qkv.weight", "layers.0.out.weight"}),
        (Encoder(drop=0.0), WORDS, 6, {"layers.layers.1.self_attn.in_proj_weight"}),
        (UNet(), PICTURE, 7, {"one.0.weight", "deep.3.weight"}),
        (resnet(), PICTURE, 5, {"3.first.weight", "4.norm.weight", "4.second.weight", "7.weight"}),
    ],
    ids=["mixer", "attention", "encoder", "unet", "resnet"],
)
def test_a_plain_module_is_the_same_function_as_a_chain(
    module: nn.Module, sample: Tensor, units: int, dealt: set[str]
) -> None:
    chain = cut(module, sample)
    dtype = torch.float64  # the run's, whatever it was traced in
    ours, theirs = chain.to(dtype).eval(), module.to(dtype).eval()
    x = batch(sample, dtype)
    assert torch.equal(ours(x), theirs(x))
    assert len(chain.blocks) == units
    assert all(any(f"{name} (dim" in line for line in chain.says) for name in dealt), chain.says


def test_skip_connections_cross_as_several_tensors() -> None:
    chain = cut(UNet(), PICTURE)
    x = chain.blocks[0](batch(PICTURE, torch.float32), None)
    assert isinstance(x, Tensor)
    x = chain.blocks[2](chain.blocks[1](x, None), None)
    assert isinstance(x, tuple) and len(x) == 3


def test_units_of_a_fused_weight_lie_together_and_are_unfolded_again() -> None:
    weight = torch.arange(24.0).view(12, 2)  # three pieces of two heads of two features
    held = folded(weight, 0, 3, 2)
    assert held[:6, 0].tolist() == [0, 2, 8, 10, 16, 18]
    assert torch.equal(unfolded(held, 0, 3, 2), weight)


def test_masks_follow_samples_not_their_order() -> None:
    chain = cut(HandAttention(), WORDS)
    x, samples = batch(WORDS, torch.float32), torch.tensor([5, 9, 2])
    straight = chain(x, Noise(0, samples))
    turned = chain(x.flip(0), Noise(0, samples.flip(0)))
    torch.testing.assert_close(straight, turned.flip(0))
    assert not torch.equal(straight, chain(x, Noise(1, samples)))
    assert torch.equal(chain(x), chain(x))


def test_a_loss_that_looks_at_several_outputs_gets_them() -> None:
    module = Smoothed()
    chain = cut(module, WORDS)
    x = batch(WORDS, torch.float32)
    assert torch.equal(chain.loss(chain(x), x), module.loss(module(x), x))
    assert not chain.anatomy.cross_entropy


def test_a_loss_that_reads_weights_keeps_the_model_whole() -> None:
    class Decayed(Smoothed):
        def loss(self, made: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
            return super().loss(made, targets) + self.head.weight.square().sum()

    whole = cut_model(UserModel(Decayed()), WORDS)
    assert isinstance(whole, UserModel) and "reads weights" in whole.anatomy.whole


def test_what_branches_on_numbers_stays_whole_and_says_where() -> None:
    whole = cut_model(UserModel(Branching()), PICTURE)
    assert isinstance(whole, UserModel) and not whole.anatomy.drawn
    assert "branches on numbers" in whole.anatomy.whole and "foreign.py" in whole.anatomy.whole
    x, noise = batch(PICTURE, torch.float32), Noise(0, torch.arange(3))
    assert torch.equal(whole(x, noise), whole(x, noise)) and not torch.equal(whole(x, noise), whole(x))


class Stateful(nn.Module):
    """One whose later calls are not as its first one: it counts them, or leaves a layer out by Python's dice."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.way, self.calls, self.seen = nn.Linear(64, 10), way, 0, {"sizes": [0]}

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "calls":
            self.calls += 1
        elif self.way == "seen":
            self.seen["sizes"].append(len(x.shape))
        elif self.way == "dice":
            random.random()
        elif self.way == "array":
            np.random.rand()
        h = self.body(x.flatten(1))
        return h * 0 if self.calls > 2 else h


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("calls", "changes calls"),
        ("seen", "changes seen"),
        ("dice", "Python's random numbers"),
        ("array", "NumPy's"),
    ],
)
def test_what_differs_from_call_to_call_stays_whole(way: str, said: str) -> None:
    whole = cut_model(UserModel(Stateful(way)), PICTURE)
    assert (
        isinstance(whole, UserModel)
        and said in whole.anatomy.whole
        and "test_inferred.py" in whole.anatomy.whole
    )
    assert isinstance(cut_model(UserModel(Stateful("")), PICTURE), InferredChain)
    if way == "calls":
        made = [bool(whole(torch.ones(1, 1, 8, 8)).any()) for _ in range(3)]
        assert made == [True, True, False], "the graph was followed without counting"


def test_draws_that_are_no_dropout_are_named() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.AlphaDropout(0.1))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    whole = cut_model(UserModel(Noisy()), PICTURE)
    assert whole.anatomy.drawn == "module.body.2 (AlphaDropout)" or "body.2" in whole.anatomy.drawn


def test_two_inputs_are_unpacked_or_asked_for() -> None:
    module = Pair()
    chain = cut(one_input(module), PICTURE)
    x = batch(PICTURE, torch.float32)
    assert torch.equal(chain(x), module(*module.unpack(x)))
    with pytest.raises(UserCodeError, match="takes 2 inputs, input1, input2"):
        one_input(nn.Bilinear(2, 2, 2))


def test_a_batch_norm_writes_down_what_its_leaf_had() -> None:
    chain = cut(resnet(), PICTURE).train()
    before = [b.clone() for b in chain.buffers()]
    chain(batch(PICTURE, torch.float32), Noise(0, torch.arange(3), micro=4))
    norms = [m for m in chain.modules() if isinstance(m, LeafNorm)]
    assert len(norms) == 6 and all(set(norm.seen) == {4} for norm in norms)
    assert all(torch.equal(a, b) for a, b in zip(before, chain.buffers(), strict=True))


def test_the_module_itself_loses_its_values_to_the_chain() -> None:
    module = GatedMixer()
    want = module.up.weight.detach().clone()
    chain = cut_model(UserModel(module), WORDS)
    assert isinstance(chain, InferredChain) and module.up.weight.numel() == 0
    (name,) = (n for n, own in chain.cut_names.items() if own.name == "up.weight")
    assert torch.equal(unfolded(chain.emptied()[name], 0, 2, 1), want)
    assert all(p.is_meta for p in chain.parameters())
