"""A traced model has the numbers of the closed forms, and of the modules themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.test_workload import GPTS, gpt_pair, image_pair
from unisono.models.noise import Noise
from unisono.models.trace import trace, units
from unisono.planner.hf_config import transformer_of
from unisono.spec.workload import Workload
from unisono_contrib.models.convnet.resnet import resnet


def traced_gpt(**fields: Any) -> tuple[Workload, Workload]:
    with torch.device("meta"):
        model, sizes = gpt_pair(**fields)

        def forward(x: Tensor) -> Tensor:
            return model(x, Noise(0, torch.arange(x.shape[0], device="meta")))

        def loss(y: Tensor) -> Tensor:
            return model.loss(y, torch.zeros(y.shape[:2], dtype=torch.int64))

        context = model.config.context
        got = trace(
            model, lambda batch: torch.zeros(batch, context, dtype=torch.int64), forward=forward, loss=loss
        )
    return got, sizes


@pytest.mark.parametrize("fields", GPTS, ids=lambda f: "-".join(map(str, f.values())) or "gpt")
def test_our_gpt(fields: dict[str, Any]) -> None:
    got, sizes = traced_gpt(**fields)
    assert got.parameters == sizes.parameters and got.tied == sizes.tied
    assert [part.name for part in got.parts] == [part.name for part in sizes.parts]
    for mine, closed in zip(got.parts, sizes.parts, strict=True):
        assert (mine.parameters, mine.flops, mine.output) == (closed.parameters, closed.flops, closed.output)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["mlp", "convnet"])
def test_our_networks(kind: str, dropout: float) -> None:
    with torch.device("meta"):
        model, sizes = image_pair(kind, dropout, 3)
        got = trace(
            model,
            lambda batch: torch.zeros(batch, 1, 9, 9),
            forward=lambda x: model(x, Noise(0, torch.arange(x.shape[0], device="meta"))),
            loss=lambda y: model.loss(y, torch.zeros(y.shape[0], dtype=torch.int64)),
        )
    assert got.parameters == sizes.parameters and got.flops == sizes.flops
    assert got.activations == pytest.approx(sizes.activations, rel=0.05)
    for mine, closed in zip(got.parts, sizes.parts, strict=True):
        assert sorted(p[:4] for p in mine.products) == sorted(p[:4] for p in closed.products)
        assert abs(mine.kernels - closed.kernels) <= 1 or dropout  # our masks are made of many small kernels
    if not dropout:
        assert moved(got) == pytest.approx(moved(sizes), rel=0.2)


def moved(sizes: Workload) -> int:
    return sum(part.moved for part in sizes.parts)


class Bottleneck(nn.Module):
    """As in He et al., 2015, with the stride in the middle."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.one = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        )
        self.two = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        )
        self.three = nn.Sequential(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after))
        self.beside = None
        if (before, stride) != (after, 1):
            self.beside = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.three(self.two(self.one(x)))
        return F.relu_(y + (x if self.beside is None else self.beside(x)))


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.pool = nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        stages, before = [], 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            made = [
                Bottleneck(before if n == 0 else 4 * width, width, 2 if stage and n == 0 else 1)
                for n in range(count)
            ]
            stages.append(nn.Sequential(*made))
            before = 4 * width
        self.stages = nn.Sequential(*stages)
        self.out = nn.Linear(before, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.pool(self.relu(self.norm(self.conv(x)))))
        return self.out(x.mean((2, 3)))


def test_a_residual_network_of_torch() -> None:
    sizes = resnet("50")
    with torch.device("meta"):
        got = trace(
            ResNet((3, 4, 6, 3)),
            lambda batch: torch.zeros(batch, 3, 224, 224),
            loss=lambda y: F.cross_entropy(y, torch.zeros(y.shape[0], dtype=torch.int64), reduction="sum"),
        )
    assert got.parameters == sizes.parameters == 25_557_032
    assert got.flops == sizes.flops and len(got.blocks) == len(sizes.blocks)
    assert got.activations == pytest.approx(sizes.activations, rel=0.05)
    for mine, closed in zip(got.parts, sizes.parts, strict=True):
        assert (mine.parameters, mine.output) == (closed.parameters, closed.output)
        assert sorted(p[:4] for p in mine.products) == sorted(p[:4] for p in closed.products)
        assert abs(mine.kernels - closed.kernels) <= 2
    # The closed form counts that batch normalisation reads its input twice, which no shape says.
    assert 0.75 * moved(sizes) < moved(got) < moved(sizes)


def test_a_module_without_lists_is_one_part() -> None:
    with torch.device("meta"):
        got = trace(nn.Linear(8, 4), lambda batch: torch.zeros(batch, 8))
    assert got.parameters == 36 and got.flops == 2 * 8 * 4 and len(got.parts) == 3


def test_parts_are_elements_of_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "body": nn.ModuleList([ResNet((1,)), nn.Linear(2, 2)])})
    assert list(units(model)) == [("first", True), ("body.0", True), ("body.1", True)]
    assert [name for name, _ in units(inner)] == ["0", "1", "2"]


def test_values_decide_nothing_here() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        trace(Branch(), lambda batch: torch.zeros(batch, 2))


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 32,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 16, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1,
}  # fmt: skip
SPARSE = {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 50, "n_positions": 16},
    "Llama": SMALL,
    "Mistral": SMALL | {"head_dim": 32},
    "Qwen2": SMALL | {"tie_word_embeddings": True},
    "Qwen3": SMALL | {"head_dim": 32},
    "Mixtral": SMALL,
    "Qwen2Moe": SMALL | SPARSE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "Qwen3Moe": SMALL | SPARSE | {"head_dim": 32},
    "DeepseekV3": SMALL | LATENT,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_transformers(family: str, tmp_path: Path) -> None:
    """The numbers of config.json are those of the model that transformers makes of it."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    config.save_pretrained(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    sizes = transformer_of(config.to_dict())
    assert sizes is not None and transformer_of(config.to_dict() | read) == sizes
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sizes.workload.parameters == sum(p.numel() for p in model.parameters())
    if sizes.experts is not None:  # its routing looks at values
        return
    with torch.device("meta"):
        got = trace(
            model,
            lambda batch: torch.zeros(batch, sizes.context, dtype=torch.int64),
            # A mask of the caller's is the one that transformers does not look into.
            forward=lambda x: (
                model(
                    input_ids=x, attention_mask=torch.zeros(x.shape[0], 1, *2 * x.shape[1:]), use_cache=False
                ).logits
            ),
        )
    assert got.parameters == sizes.workload.parameters and got.flops == sizes.workload.flops
    assert len(got.blocks) == sizes.n_layer
