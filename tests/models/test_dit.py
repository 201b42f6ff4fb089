"""The diffusion transformer: what it computes, what its samples are, and that these are functions of their position."""

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unisono.comm.members import Shape
from unisono.comm.mesh import Mesh
from unisono.config import DataConfig, Recipe, TrainConfig
from unisono.config.resolve import recipe_problems
from unisono.models.build import build
from unisono.models.gpt.net import Core
from unisono.models.init import initialise
from unisono.models.noise import Dropout, Noise, numbers
from unisono.observe.span import Recorder
from unisono.parallel.attend import CONTEXT_WAYS
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts, ModelConfig
from unisono.train.data.dataset import Images, fetched
from unisono_contrib.comm import threads
from unisono_contrib.models.dit import DiTConfig
from unisono_contrib.train.data.flow import Noisy, conditioned, patched, unpatched
from unisono_contrib.train.drawing import drawn, png

FACTS = Facts(classes=10, sample_shape=(1, 8, 8))
CONFIG = DiTConfig(n_layer=2, n_head=2, d_model=16)
WIDE = torch.float64


def model(random: bool = True) -> nn.Module:
    net = build(CONFIG, FACTS, "cpu").to(WIDE)
    initialise(net, 3)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters() if random else ():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw, dtype=WIDE))
    return net


def samples() -> Noisy:
    draw = torch.Generator().manual_seed(0)
    images = Images(torch.rand(40, 1, 8, 8, generator=draw), torch.arange(40) % 10)
    return Noisy(images, CONFIG, 10)


def test_it_begins_at_no_velocity_and_blocks_that_change_nothing() -> None:
    net, x = model(random=False), samples().fetch(np.arange(4))[0].double()
    assert not net(x).any()
    carry = net.stem(x)
    assert torch.equal(net.blocks[0](carry)[0], carry[0])


def test_every_patch_sees_every_other() -> None:
    net, x = model(), samples().fetch(np.arange(1))[0].double().requires_grad_()
    for patch in (0, 15):
        (grad,) = torch.autograd.grad(net(x)[0, patch].sum(), x)
        assert (grad[0, :, 0].abs() > 0).all()


def test_time_and_class_change_what_is_computed() -> None:
    net, patches = model(), torch.rand(1, 16, 4, dtype=WIDE)
    ys = [
        net(conditioned(patches, torch.tensor([t]), torch.tensor([c])))
        for t, c in ((0.1, 3), (0.2, 3), (0.1, 10))
    ]
    assert not torch.allclose(ys[0], ys[1]) and not torch.allclose(ys[0], ys[2])


def test_a_sample_is_a_function_of_seed_and_position() -> None:
    """However the positions are split among calls, and in any order."""
    data, at = samples(), np.arange(100, 112)
    numbers_ = data.numbers_at(7, at)
    whole = fetched(data, 7, at, numbers_)
    for part in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [11, 3, 7]):
        for got, want in zip(fetched(data, 7, at[part], numbers_[part]), whole, strict=True):
            assert torch.equal(got, want[part])
    other = fetched(data, 7, at + 40, numbers_)
    assert not torch.equal(other[0], whole[0])  # the same pictures, in another epoch
    assert not torch.equal(fetched(data, 8, at, numbers_)[0], whole[0])


def test_a_sample_lies_on_the_path_from_its_noise_to_its_picture() -> None:
    data, at = samples(), np.arange(4000)
    x, velocity = fetched(data, 1, at, at % 40)
    time = x[:, 0, -2][:, None, None]
    pictures = patched(2 * data.inner.fetch(at % 40)[0] - 1, 2)
    torch.testing.assert_close(x[..., :4] + (1 - time) * velocity, pictures, rtol=0, atol=1e-5)
    noise = x[..., :4] - time * velocity
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    assert abs(time.mean() - 0.5) < 0.01 and abs((x[:, 0, -1] == 10).double().mean() - 0.1) < 0.02
    assert torch.equal(unpatched(pictures, (1, 8, 8), 2), 2 * data.inner.fetch(at % 40)[0] - 1)


@pytest.mark.parametrize("name", CONTEXT_WAYS.names())
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_to_all_positions_is_one_device_s(name: str, dropout: float) -> None:
    """Where no position is hidden, the ways of cp hide none."""
    way, ranks, positions, heads = CONTEXT_WAYS.read(name), 2, 8, 4
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, heads, positions, 3, generator=draw, dtype=WIDE)

    def attended(core: nn.Module, at: Tensor) -> list[Tensor]:
        parts = [x[:, :, at].requires_grad_() for x in (q, k, v)]
        out = core(*parts, Noise(7, torch.arange(2)))
        return [out.detach(), *torch.autograd.grad(out, parts, grad[:, :, at])]

    def on(rank: int) -> tuple[Tensor, list[Tensor]]:
        group = Mesh(Shape(cp=ranks), rank, Recorder(rank), timedelta(seconds=60)).cp
        held, core = way.places(positions, rank, ranks), Core(Dropout(dropout), causal=False)
        if way.by_heads:
            core.drop.places[1] = type(held).whole(heads).dealt(rank, ranks)
        at = numbers(held, torch.device("cpu"))
        return at, attended(way.bind(core, group, positions), at)

    want = attended(Core(Dropout(dropout), causal=False), torch.arange(positions))
    for at, got in threads.run(ranks, on):
        for mine, whole in zip(got, want, strict=True):
            torch.testing.assert_close(mine, whole[:, :, at], rtol=0, atol=1e-12)


class Straight(nn.Module):
    """A flow whose velocity is known: towards a picture of `level`, and away from it where no class is said."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.level - x[..., :-2]) / (1.0 - x[..., -2:-1]) * (x[..., -1:] < 10)


def test_euler_s_steps_arrive() -> None:
    labels = torch.arange(3)
    for steps in (1, 7):
        got = drawn(Straight(), CONFIG, (1, 8, 8), labels, 10, steps=steps, guidance=1.0, seed=0)
        torch.testing.assert_close(got, torch.full((3, 1, 8, 8), 0.75))
    strong = drawn(Straight(), CONFIG, (1, 8, 8), labels, 10, steps=1, guidance=2.0, seed=0)
    assert not torch.allclose(strong, torch.full((3, 1, 8, 8), 0.75))
    assert png(got, columns=2).startswith(b"\x89PNG")


def test_patches_must_fill_the_picture() -> None:
    config = ModelConfig(kind="dit", patch=3)
    with pytest.raises(UsageError, match="patches of 3 x 3") as refused:
        build(config, FACTS)
    assert refused.value.code == "C06"
    (problem,) = ModelConfig(kind="dit", patch=3, image=(1, 8, 8)).problems()
    assert problem.code == "C06"


def test_losses_and_metrics_of_classes_are_refused() -> None:
    train = TrainConfig(loss="cross_entropy", metrics=("accuracy",))
    recipe = Recipe(model=CONFIG, data=DataConfig(source="digits"), train=train)
    assert [problem.where for problem in recipe_problems(recipe)] == [
        "train.loss, model.kind",
        "train.metrics, model.kind",
    ]
