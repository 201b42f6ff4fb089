"""The closed forms agree with the modules: parameters and arithmetic exactly, what networks keep nearly."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unisono.config import ModelConfig
from unisono.models.gpt import GPTConfig
from unisono.models.gpt.net import GPT
from unisono.models.init import initialise
from unisono.models.noise import Noise
from unisono.parallel.cut import tensors_of
from unisono.planner.work.transformer import transformer
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts
from unisono.spec.workload import Workload
from unisono_contrib.models.convnet.net import ConvNet
from unisono_contrib.models.dit.net import DiT
from unisono_contrib.models.mlp.net import MLP

BATCH = 3
GPTS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": False, "bias": False},
    {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "n_kv_head": 2},
    {"positions": "rotary", "norm": "rms", "activation": "swiglu", "d_ff": 72},
    {"n_kv_head": 1},
    {"dropout": 0.1},
    {"norm": "rms", "n_kv_head": 4},
]


def gpt_pair(**fields: Any) -> tuple[GPT, Workload]:
    config = GPTConfig(**({"vocab": 37, "n_layer": 2, "n_head": 4, "d_model": 32, "context": 16} | fields))
    return GPT(config), transformer(config, 37).workload


def image_pair(kind: str, dropout: float, n_layer: int) -> tuple[nn.Module, Workload]:
    own = {"hidden": (48, 24, 40)[:n_layer]} if kind == "mlp" else {"n_layer": n_layer, "channels": 12}
    config = ModelConfig(kind=kind, dropout=dropout, **own)
    made = (MLP if kind == "mlp" else ConvNet)(config, 10, (1, 9, 9))
    return made, config.workload(Facts(classes=10, sample_shape=(1, 9, 9)))


def dit_pair(**fields: Any) -> tuple[nn.Module, Workload]:
    config, facts = (
        ModelConfig(kind="dit", n_layer=2, d_model=32, patch=3, **fields),
        Facts(classes=10, sample_shape=(1, 9, 9)),
    )
    return config.build(facts), config.workload(facts)


def every() -> list[Any]:
    gpts = [pytest.param(lambda f=f: gpt_pair(**f), id=f"gpt-{'-'.join(map(str, f.values()))}") for f in GPTS]
    images = [
        pytest.param(lambda k=k, p=p, n=n: image_pair(k, p, n), id=f"{k}-{p}-{n}")
        for k in ("mlp", "convnet")
        for p in (0.0, 0.1)
        for n in (1, 2, 3)
    ]
    dits = [
        pytest.param(lambda f=f: dit_pair(**f), id=f"dit-{'-'.join(map(str, f))}")
        for f in ({}, {"bias": False}, {"dropout": 0.1})
    ]
    return gpts + images + dits


def batch(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(model, GPT):
        tokens = torch.randint(0, 37, (BATCH, 17))
        return tokens[:, :-1], tokens[:, 1:]
    if isinstance(model, DiT):
        return torch.rand(BATCH, 9, 11), torch.randn(BATCH, 9, 9)
    return torch.randn(BATCH, 1, 9, 9), torch.randint(0, 10, (BATCH,))


@pytest.mark.parametrize("pair", every())
def test_closed_forms_are_those_of_the_modules(pair: Any) -> None:
    parameters(*pair())
    flops_and_outputs(*pair())
    if not isinstance(pair()[0], GPT):  # of which tests/models/test_kept.py says what it keeps
        activations(*pair())


def parameters(model: Any, sizes: Workload) -> None:
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    parts = (model.stem, *model.blocks, model.head)
    assert [p.parameters for p in sizes.parts] == [sum(w.numel() for w in m.parameters()) for m in parts]


def flops_and_outputs(model: Any, sizes: Workload) -> None:
    x, _ = batch(model)
    for module, part in zip((model.stem, *model.blocks, model.head), sizes.parts, strict=True):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            x = module(x)
        assert counter.get_total_flops() == BATCH * part.flops, part.name
        assert sum(y.numel() for y in tensors_of(x)) == BATCH * part.output, part.name


def activations(model: Any, sizes: Workload) -> None:
    initialise(model, 0)
    inputs, targets = batch(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {inputs.untyped_storage().data_ptr()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        noise = Noise(0, torch.arange(BATCH))
        loss = model.loss(model(inputs, noise), targets)
    elements = sum(t.untyped_storage().nbytes() for t in kept.values()) / 4
    assert elements == pytest.approx(BATCH * sizes.activations, rel=0.04)
    loss.backward()


def sizes_of(vocab: int, **fields: Any) -> Workload:
    return transformer(GPTConfig(**fields), vocab).workload


def test_published_sizes() -> None:
    """GPT-2's four sizes and Llama 2 7B, Llama 3 8B, from their model cards."""
    for layers, heads, width, count in (
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ):
        sizes = sizes_of(n_layer=layers, n_head=heads, d_model=width, context=1024, vocab=50257)
        assert sizes.parameters == count
    llama: dict[str, Any] = {
        "n_layer": 32,
        "n_head": 32,
        "d_model": 4096,
        "bias": False,
        "tie_embeddings": False,
        "positions": "rotary",
        "activation": "swiglu",
    }
    assert sizes_of(context=4096, vocab=32000, d_ff=11008, **llama).parameters == 6_738_415_616
    assert sizes_of(context=8192, vocab=128256, d_ff=14336, n_kv_head=8, **llama).parameters == 8_030_261_248


def test_steps() -> None:
    sizes = sizes_of(n_layer=12, n_head=12, d_model=768, context=1024, vocab=50257)
    assert sizes.step_flops == 3 * sizes.flops
    # Kaplan et al., 2020: about 2 operations a parameter and token, plus attention.
    exact = 2 * (124_439_808 - 1024 * 768) + 4 * 12 * 1024 * 768
    assert sizes.flops / 1024 == pytest.approx(exact, rel=2e-3)


def test_of_a_recipe() -> None:
    config = GPTConfig(vocab=256, positions="rotary", activation="swiglu", norm="rms", n_kv_head=2)
    assert transformer(config, 256).workload.parameters == sum(p.numel() for p in GPT(config).parameters())
    image = Facts(classes=10, sample_shape=(1, 8, 8))
    count = 64 * 128 + 3 * 128 * 128 + 4 * 128 + 1290
    assert ModelConfig(kind="mlp").workload(image).parameters == count
    assert len(ModelConfig(kind="convnet").workload(image).blocks) == 4
    for model in (ModelConfig(kind="mine.py:model"), ModelConfig(kind="mlp")):
        with pytest.raises(UsageError):
            model.workload(Facts(vocab=256))
