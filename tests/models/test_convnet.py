"""The convnet: its parts compose to the whole, no sample sees another, and it learns the digits."""

import itertools

import pytest
import torch

from unisono.config import ModelConfig
from unisono.models.build import Facts, build
from unisono.models.init import initialise
from unisono.models.noise import Noise
from unisono.spec.errors import UsageError
from unisono_contrib.models.convnet import conv_stages

FACTS = Facts(classes=10, sample_shape=(1, 8, 8))


def model(**fields: object) -> torch.nn.Module:
    made = build(
        ModelConfig.model_validate({"kind": "convnet", "channels": 12} | fields), FACTS, "cpu"
    ).double()
    initialise(made, 3)
    return made


def test_parts_compose_to_the_whole() -> None:
    net, x, noise = model(dropout=0.1), torch.rand(5, 1, 8, 8, dtype=torch.float64), Noise(1, torch.arange(5))
    y = net.stem(x, noise)
    for block in net.blocks:
        y = block(y, noise)
    assert torch.equal(net.head(y), net(x, noise))
    assert net(x).shape == (5, 10) and net.anatomy.sequence == 0


def test_each_sample_is_alone() -> None:
    """No statistics of the batch, and masks that belong to the sample: micro-batches change nothing."""
    net, x = model(dropout=0.1), torch.rand(6, 1, 8, 8, dtype=torch.float64)
    whole = net(x, Noise(1, torch.arange(6)))
    halves = [net(x[part], Noise(1, torch.arange(6)[part])) for part in (slice(0, 1), slice(1, 6))]
    assert torch.allclose(whole, torch.cat(halves), rtol=1e-12)


def test_stages() -> None:
    assert conv_stages(1, 8) == ((8, 8, 1),)
    assert conv_stages(2, 8) == ((8, 8, 1), (8, 16, 2))
    assert conv_stages(4, 8) == ((8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 32, 2))
    for n_layer in range(1, 20):
        stages = conv_stages(n_layer, 8)
        assert len(stages) == n_layer and stages[-1][1] == 8 << min(n_layer - 1, 2)
        assert all(after == before for (_, after, _), (before, _, _) in itertools.pairwise(stages))


@pytest.mark.parametrize("image", [(1, 1, 1), (3, 5, 7), (1, 28, 28)])
def test_any_image(image: tuple[int, int, int]) -> None:
    net = build(ModelConfig(kind="convnet", channels=6), Facts(classes=4, sample_shape=image), "cpu")
    assert net(torch.rand(2, *image)).shape == (2, 4)


def test_only_images() -> None:
    with pytest.raises(UsageError, match="reads images"):
        build(ModelConfig(kind="convnet"), Facts(classes=4, sample_shape=(64,)))


def test_signal_neither_dies_nor_explodes() -> None:
    net = model(n_layer=16)
    with torch.no_grad():
        assert 0.1 < float(net(torch.randn(16, 1, 8, 8, dtype=torch.float64)).std()) < 10


@pytest.mark.timeout(120)
def test_it_learns() -> None:
    torch.manual_seed(0)
    net = model(n_layer=3).float()
    images = torch.zeros(64, 1, 8, 8)
    targets = torch.arange(64) % 4
    for number, target in enumerate(targets.tolist()):  # a bright corner: which one is the class
        row, column = 4 * (target // 2), 4 * (target % 2)
        images[number, 0, row : row + 4, column : column + 4] = 1.0
    images += 0.3 * torch.randn_like(images)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(40):
        optimiser.zero_grad()
        (net.loss(net(images), targets) / 64).backward()
        optimiser.step()
    assert float(net.loss(net(images), targets).detach()) / 64 < 0.3
