"""A diffusion transformer: patches of a noisy picture → the velocity of each (Peebles and Xie, "Scalable diffusion
models with transformers", 2023, https://arxiv.org/abs/2212.09748).

Positions are learned; in the paper they are sines. Each patch brings the time and the class of its picture as two more
numbers, so whoever holds any patch of a picture knows them.

Shapes: B batch, T patches, D width, P values of a patch.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.chain import Chain
from unisono.models.gpt.net import Attention, FeedForward, Positions, anatomy_of
from unisono.models.init import Rule
from unisono.models.noise import Dropout, Noise
from unisono.spec.layout import Anatomy, Split
from unisono_contrib.models.dit import WAVES, DiTConfig

Conditioned = tuple[
    Tensor, Tensor
]  # residual stream [B, T, D]; what a picture's time and class are as numbers, [B, 1, D]


def waves(time_B1: Tensor) -> Tensor:
    """Times in 0..1 → cosines and sines of 1000 times as much, at speeds from 1 to 1/10000, [B, 1, WAVES]."""
    half = WAVES // 2
    speed = torch.exp(torch.arange(half, device=time_B1.device) * (-math.log(10000.0) / half))
    angle = 1000.0 * time_B1.unsqueeze(-1) * speed.to(time_B1.dtype)
    return torch.cat((angle.cos(), angle.sin()), -1)


def modulated(x_BTD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
    """x · (1 + scale) + shift."""
    return x_BTD * (1.0 + scale_B1D) + shift_B1D


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)


class DiTStem(nn.Module):
    """Patches with their picture's time and class [B, T, P + 2] → `Conditioned`."""

    def __init__(self, config: DiTConfig, patches: int, values: int, classes: int) -> None:
        super().__init__()
        width = config.d_model
        self.patch = nn.Linear(values, width, bias=config.bias)
        self.pos = Positions(patches, width)
        self.time1 = nn.Linear(WAVES, width, bias=config.bias)
        self.time2 = nn.Linear(width, width, bias=config.bias)
        self.label = nn.Embedding(classes + 1, width)  # the last one stands for no class

    def forward(self, x_BTP: Tensor, noise: Noise | None = None) -> Conditioned:
        patches_BTP, time_B1, label_B1 = x_BTP[..., :-2], x_BTP[:, :1, -2], x_BTP[:, :1, -1]
        cond_B1D = self.time2(F.silu(self.time1(waves(time_B1)))) + self.label(label_B1.long())
        return self.pos(self.patch(patches_BTP), noise), F.silu(cond_B1D)


class DiTBlock(nn.Module):
    """Attention and feed-forward, each behind a norm whose scale and shift, and before a gate whose size, depend on
    time and class (adaLN-Zero: gates begin at zero)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        layers = config.layers
        self.mod = nn.Linear(config.d_model, 6 * config.d_model, bias=config.bias)
        self.norm1, self.norm2 = _norm(config.d_model), _norm(config.d_model)
        self.attn = Attention(layers, causal=False)
        self.drop1 = Dropout(config.dropout)
        self.mlp = FeedForward(layers)
        self.drop2 = Dropout(config.dropout)

    def forward(self, carry: Conditioned, noise: Noise | None = None) -> Conditioned:
        x_BTD, cond_B1D = carry
        shift1, scale1, gate1, shift2, scale2, gate2 = self.mod(cond_B1D).chunk(6, -1)
        y_BTD = self.attn(modulated(self.norm1(x_BTD), shift1, scale1), noise)
        x_BTD = x_BTD + gate1 * self.drop1(y_BTD, noise)
        y_BTD = self.mlp(modulated(self.norm2(x_BTD), shift2, scale2))
        # FSDP2 makes a view of what comes in, and warns of one that goes out.
        return x_BTD + gate2 * self.drop2(y_BTD, noise), cond_B1D.clone()


class DiTHead(nn.Module):
    """`Conditioned` → velocities [B, T, P], which begin at zero."""

    def __init__(self, config: DiTConfig, values: int) -> None:
        super().__init__()
        self.mod = nn.Linear(config.d_model, 2 * config.d_model, bias=config.bias)
        self.norm = _norm(config.d_model)
        self.out = nn.Linear(config.d_model, values, bias=False)

    def forward(self, carry: Conditioned) -> Tensor:
        x_BTD, cond_B1D = carry
        return self.out(modulated(self.norm(x_BTD), *self.mod(cond_B1D).chunk(2, -1)))


def summed_squares(velocity: Tensor, target: Tensor) -> Tensor:
    """Squared errors, summed over all values of all patches."""
    return (velocity - target).square().sum()


class DiT(Chain):
    """`forward(patches, time, class [B, T, P + 2], noise) → velocities [B, T, P]`.

    patches: of a picture. values: of a patch. classes: of the targets; one more stands for none.
    """

    def __init__(self, config: DiTConfig, patches: int, values: int, classes: int) -> None:
        stem = DiTStem(config, patches, values, classes)
        blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.n_layer))
        super().__init__(stem, blocks, DiTHead(config, values), _anatomy(config, patches))
        self.loss = summed_squares

    def initial_rules(self) -> Mapping[str, Rule]:
        """The paper's: uniform by fan-in and fan-out (Glorot, 2010), what modulates and what leaves zero, tables and
        layers of the time normal with std 0.02, no bias."""
        rules: dict[str, Rule] = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or ".mod." in name or name == "head.out.weight":
                rules[name] = ("zeros", 0.0)
            elif name.startswith("stem.") and name != "stem.patch.weight":
                rules[name] = ("normal", 0.02)
            else:
                rules[name] = ("uniform", math.sqrt(6.0 / sum(parameter.shape)))
        return rules


def _anatomy(config: DiTConfig, patches: int) -> Anatomy:
    """A gpt's blocks, patches in the place of tokens."""
    like = anatomy_of(config.layers)
    ours = {name: split for name, split in like.splits.items() if name.startswith("blocks.")}
    ends = {"stem.patch": Split.SLICED, "stem.pos": Split.POSITIONS, "head.out": Split.VOCAB_OUT}
    return Anatomy(
        splits=ours | ends, divides=like.divides, units=like.units, sequence=patches, again=like.again
    )
