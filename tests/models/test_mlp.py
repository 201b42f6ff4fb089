"""The MLP: its parts compose to the whole, samples do not see each other, and tensor slices add up."""

import torch
import torch.nn.functional as F

from unisono.config import ModelConfig
from unisono.models.build import Facts, build
from unisono.models.init import initialise
from unisono.models.noise import Noise
from unisono.spec.layout import Split

CONFIG = ModelConfig(kind="mlp", hidden=(24, 16), dropout=0.2)
FACTS = Facts(classes=10, sample_shape=(1, 8, 8))


def model() -> torch.nn.Module:
    made = build(CONFIG, FACTS, "cpu").double()
    initialise(made, 3)
    return made


def test_parts_compose_to_the_whole() -> None:
    mlp, x, noise = model(), torch.rand(5, 1, 8, 8, dtype=torch.float64), Noise(1, torch.arange(5))
    y = mlp.stem(x, noise)
    for block in mlp.blocks:
        y = block(y, noise)
    assert torch.equal(mlp.head(y), mlp(x, noise))
    assert mlp(x).shape == (5, 10) and len(mlp.blocks) == 2


def test_each_sample_is_alone() -> None:
    """Also with dropout, whose mask belongs to the sample."""
    mlp, x = model(), torch.rand(6, 1, 8, 8, dtype=torch.float64)
    whole = mlp(x, Noise(1, torch.arange(6)))
    halves = [mlp(x[part], Noise(1, torch.arange(6)[part])) for part in (slice(0, 2), slice(2, 6))]
    assert torch.allclose(whole, torch.cat(halves), rtol=1e-13)


def test_loss_is_a_sum() -> None:
    logits, targets = torch.randn(7, 10), torch.arange(7)
    alone = sum(model().loss(logits[i : i + 1], targets[i : i + 1]) for i in range(7))
    assert torch.allclose(model().loss(logits, targets), torch.as_tensor(alone))


def test_anatomy_cuts_pairs() -> None:
    """Computed by hand from slices of `up`'s rows and `down`'s columns, a block gives the same."""
    mlp = model()
    assert (
        mlp.anatomy.split_of("blocks.1.up") is Split.COLUMN
        and mlp.anatomy.split_of("blocks.1.down") is Split.ROW
    )
    assert set(mlp.anatomy.divides.values()) == {24, 16} and mlp.anatomy.sequence == 0
    block, x = mlp.blocks[0], torch.rand(5, 64, dtype=torch.float64)
    partial = sum(
        F.gelu(F.linear(x, block.up.weight[part], block.up.bias[part])) @ block.down.weight[:, part].T
        for part in (slice(0, 12), slice(12, 24))
    )
    assert torch.allclose(F.gelu(partial + block.down.bias), block(x), rtol=1e-12)


def test_signal_neither_dies_nor_explodes() -> None:
    mlp = build(ModelConfig(kind="mlp", hidden=(256,) * 8), FACTS, "cpu")
    initialise(mlp, 0)
    with torch.no_grad():
        assert (
            0.05 < float(mlp(torch.randn(64, 1, 8, 8)).std()) < 20
        )  # eight layers of a gain of 0.5 would leave 0.004
