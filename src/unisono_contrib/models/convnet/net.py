"""A residual convolutional network with group normalisation.

Pre-activation blocks (He et al., "Identity mappings in deep residual networks", 2016); groups instead of
batches in the norms (Wu and He, "Group normalization", 2018), because statistics of a batch would depend on
how the batch is cut into micro-batches, and so on the layout.
Shapes: B batch, C channels, Y rows, X columns.
"""

import math
from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.chain import Chain
from unisono.models.init import Rule
from unisono.models.noise import Dropout, Noise
from unisono.spec.errors import UsageError
from unisono.spec.layout import Anatomy, Split, Units
from unisono_contrib.models.convnet import ConvNetConfig, conv_stages, norm_groups


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(norm_groups(channels), channels)


class ConvStem(nn.Module):
    """Images [B, C, Y, X] → residual stream of the first stage."""

    def __init__(self, colours: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(colours, channels, 3, padding=1, bias=False)

    def forward(self, images_BCYX: Tensor, noise: Noise | None = None) -> Tensor:
        return self.conv(images_BCYX)


class ResidualBlock(nn.Module):
    """Norm, ReLU, convolution, twice; a 1 x 1 convolution beside it where width or resolution changes."""

    def __init__(self, before: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = _norm(before)
        self.conv1 = nn.Conv2d(before, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = _norm(channels)
        self.drop = Dropout(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        changes = before != channels or stride != 1
        self.skip = nn.Conv2d(before, channels, 1, stride=stride, bias=False) if changes else None

    def forward(self, x_BCYX: Tensor, noise: Noise | None = None) -> Tensor:
        y_BCYX = F.relu(self.norm1(x_BCYX))
        passed_BCYX = x_BCYX if self.skip is None else self.skip(y_BCYX)
        y_BCYX = F.relu(self.norm2(self.conv1(y_BCYX)))
        return passed_BCYX + self.conv2(self.drop(y_BCYX, noise))


class ConvHead(nn.Module):
    """Residual stream → logits [B, classes], averaged over the image."""

    def __init__(self, channels: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.out = nn.Linear(channels, classes, bias=bias)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(x_BCYX)).mean((2, 3)))


class ConvNet(Chain):
    """`forward(images [B, C, Y, X], noise) → logits [B, classes]`.

    config: of it `channels`, the width of the first of up to three stages (each later one has twice the
    width at half the resolution), `n_layer`, the residual blocks dealt over the stages, `dropout` between
    the convolutions of a block, and `bias` of the classifier. classes: of the targets. shape: (colours,
    rows, columns) of a sample.
    Raises UsageError C04 where samples are no images.
    """

    def __init__(self, config: ConvNetConfig, classes: int, shape: Sequence[int]) -> None:
        if len(shape) != 3:
            raise UsageError(
                f"a convnet reads images, not samples of shape {tuple(shape)}",
                code="C04",
                where="model.kind",
                fix='model.kind = "mlp", which reads samples of any shape',
            )
        stages = conv_stages(config.n_layer, config.channels)
        super().__init__(
            ConvStem(shape[0], config.channels),
            nn.ModuleList(
                ResidualBlock(before, after, stride, config.dropout) for before, after, stride in stages
            ),
            ConvHead(stages[-1][1], classes, config.bias),
            _anatomy([after for _, after, _ in stages]),
        )

    def initial_rules(self) -> Mapping[str, Rule]:
        """Variance 2 / fan-in (He et al., 2015); the last convolution of a branch divided by sqrt(blocks)."""
        rules: dict[str, Rule] = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                rules[name] = ("zeros" if name.endswith("bias") else "ones", 0.0)
                continue
            fan_in = parameter[0].numel()
            gain = 1.0 if name.startswith(("stem.", "head.")) or ".skip." in name else 2.0
            if name.endswith("conv2.weight"):
                gain /= len(self.blocks)
            rules[name] = ("normal", math.sqrt(gain / fan_in))
        return rules


def _anatomy(widths: Sequence[int]) -> Anatomy:
    """Channels between the convolutions of a block are dealt, by the groups of the norm there. widths: of blocks."""
    splits = {"conv1": Split.COLUMN, "norm2": Split.NORM, "drop": Split.HEAD_DROPOUT, "conv2": Split.ROW}
    units = [Units(norm_groups(width), width // norm_groups(width)) for width in widths]
    return Anatomy(
        splits={f"blocks.*.{part}": split for part, split in splits.items()},
        divides={f"groups of channels of block {n}": unit.count for n, unit in enumerate(units)},
        units={f"blocks.{n}.{part}": unit for n, unit in enumerate(units) for part in splits},
    )
