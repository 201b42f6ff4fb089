"""What networks compute, beside functions that are written out here."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.build import build
from unisono.spec.model import Facts, ModelConfig
from unisono_contrib.models.convnet import norm_groups
from unisono_contrib.models.dlrm import DLRMConfig
from unisono_contrib.models.dlrm.net import DLRM

WIDE = torch.float64


def random(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with weights of which none is zero or one, and they by name."""
    model = model.to(WIDE)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw, dtype=WIDE))
    return model, dict(model.named_parameters())


def test_a_perceptron_has_a_gelu_behind_each_layer() -> None:
    config = ModelConfig.model_validate({"kind": "mlp", "hidden": [6, 5], "dropout": 0.3})
    model, w = random(build(config, Facts(classes=3, sample_shape=(2, 4)), "cpu"))
    x = torch.randn(7, 2, 4, dtype=WIDE)
    y = x.flatten(1)
    for layer in ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"):
        z = y @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]
        y = z * 0.5 * (1 + torch.erf(z / 2**0.5))
    torch.testing.assert_close(model(x), y @ w["head.out.weight"].T + w["head.out.bias"])


def test_a_convnet_is_one_of_residual_blocks_whose_activations_come_first() -> None:
    config = ModelConfig.model_validate({"kind": "convnet", "n_layer": 3, "channels": 8, "dropout": 0.3})
    model, w = random(build(config, Facts(classes=3, sample_shape=(2, 8, 8)), "cpu"))

    def active(name: str, x: Tensor) -> Tensor:
        groups = norm_groups(x.shape[1])
        apart = x.unflatten(1, (groups, -1))
        mean = apart.mean((2, 3, 4), keepdim=True)
        spread = (apart - mean).square().mean((2, 3, 4), keepdim=True)
        normed = ((apart - mean) / (spread + 1e-5).sqrt()).flatten(1, 2)
        return (normed * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]).clamp(min=0)

    images = torch.randn(4, 2, 8, 8, dtype=WIDE)
    x, side = F.conv2d(images, w["stem.conv.weight"], padding=1), 8
    for at in (f"blocks.{n}" for n in range(3)):
        wide = w[f"{at}.conv1.weight"].shape[0]
        stride = 1 if wide == x.shape[1] else 2  # twice the width at half the resolution
        side //= stride
        y = active(f"{at}.norm1", x)
        if stride == 2:
            x = F.conv2d(y, w[f"{at}.skip.weight"], stride=2)
        y = F.conv2d(y, w[f"{at}.conv1.weight"], padding=1, stride=stride)
        x = x + F.conv2d(active(f"{at}.norm2", y), w[f"{at}.conv2.weight"], padding=1)
        assert x.shape[2:] == (side, side)
    want = active("head.norm", x).mean((2, 3)) @ w["head.out.weight"].T + w["head.out.bias"]
    torch.testing.assert_close(model(images), want)


def test_a_recommender_multiplies_all_pairs_of_its_features() -> None:
    """Naumov et al., "Deep learning recommendation model" (2019): products below the diagonal, none with itself."""
    keys = {"kind": "dlrm", "n_dense": 3, "bottom": (5,), "d_table": 4, "top": (6,), "lookups": 2}
    model, w = random(DLRM(DLRMConfig.model_validate(keys), (7, 9, 8)))
    numbers, index = torch.randn(5, 3, dtype=WIDE), torch.randint(7, (5, 3, 2))
    found = model(torch.cat((numbers.view(torch.int64), index.flatten(1)), 1))

    def layer(name: str, x: Tensor) -> Tensor:
        return (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).clamp(min=0)

    x = layer("blocks.0.bottom.layers.1", layer("blocks.0.bottom.layers.0", numbers))
    rows = [sum(w[f"stem.tables.{t}.weight"][index[:, t, n]] for n in range(2)) for t in range(3)]
    features = [x, *rows]
    pairs = [(features[i] * features[j]).sum(1) for i in range(4) for j in range(i)]
    y = layer("blocks.1.layers.0", torch.cat((x, torch.stack(pairs, 1)), 1))
    score = y @ w["head.out.weight"].T + w["head.out.bias"]
    torch.testing.assert_close(found, torch.cat((torch.zeros_like(score), score), 1))


def test_experts_that_all_take_are_added_to_those_that_are_chosen() -> None:
    keys = {
        "kind": "moe", "n_layer": 4, "n_head": 2, "d_model": 8, "context": 4, "vocab": 11, "n_experts": 4,
        "n_shared_experts": 2, "d_expert": 6, "moe_every": 2, "n_dense_first": 1,
    }  # fmt: skip
    model, w = random(build(ModelConfig.model_validate(keys), Facts(), "cpu"))
    sparse = [hasattr(block.mlp, "experts") for block in model.blocks]  # type: ignore[union-attr]
    assert sparse == [False, False, True, False]  # of the three behind the first, the second
    layer, x = model.blocks[2].mlp, torch.randn(3, 4, 8, dtype=WIDE)  # type: ignore[index,union-attr]
    chosen = layer.dispatch(x, layer.router(x, None), layer.experts)  # type: ignore[union-attr,operator]
    at = "blocks.2.mlp.shared"
    hidden = F.gelu(x @ w[f"{at}.up.weight"].T + w[f"{at}.up.bias"])
    assert hidden.shape[-1] == 12
    want = chosen + hidden @ w[f"{at}.down.weight"].T + w[f"{at}.down.bias"]
    torch.testing.assert_close(layer(x, None), want)  # type: ignore[operator]


def test_gated_experts_multiply_what_they_let_through() -> None:
    keys = {"kind": "moe", "n_layer": 1, "n_head": 2, "d_model": 8, "context": 4, "vocab": 11, "n_experts": 3}
    model, w = random(build(ModelConfig.model_validate({**keys, "activation": "swiglu"}), Facts(), "cpu"))
    x, at = torch.randn(6, 8, dtype=WIDE), "blocks.0.mlp.experts"
    bias = {part: w[f"{at}.{part}_bias"].view(3, -1) for part in ("gate", "up", "down")}
    rows = []
    for e, some in ((0, x[:1]), (2, x[1:])):
        gate, up = (some @ w[f"{at}.{part}"][e].T + bias[part][e] for part in ("gate", "up"))
        rows.append((gate / (1 + (-gate).exp()) * up) @ w[f"{at}.down"][e].T + bias["down"][e])
    torch.testing.assert_close(model.blocks[0].mlp.experts(x, [1, 0, 5]), torch.cat(rows))  # type: ignore[index,union-attr,operator]
