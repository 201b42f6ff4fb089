"""A plain multi-layer perceptron, in blocks of two layers: `tp` cuts one by columns, one by rows.

Shapes: B batch, I features of a sample, H hidden width.
"""

import math
from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from unisono.models.chain import Chain
from unisono.models.init import Rule
from unisono.models.noise import Dropout, Noise
from unisono.spec.layout import Anatomy, Split
from unisono_contrib.models.mlp import MLPConfig


class MLPStem(nn.Module):
    """Any sample [B, ...] → its features in one row [B, I]."""

    def forward(self, inputs: Tensor, noise: Noise | None = None) -> Tensor:
        return inputs.flatten(1)


class MLPBlock(nn.Module):
    """[B, width] → [B, hidden]: two layers with GELU after each, then dropout."""

    def __init__(self, width: int, hidden: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, hidden, bias=bias)
        self.drop = Dropout(dropout)

    def forward(self, x_BH: Tensor, noise: Noise | None = None) -> Tensor:
        return self.drop(F.gelu(self.down(F.gelu(self.up(x_BH)))), noise)


class MLPHead(nn.Module):
    """[B, H] → logits [B, classes]."""

    def __init__(self, hidden: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, classes, bias=bias)

    def forward(self, x_BH: Tensor) -> Tensor:
        return self.out(x_BH)


class MLP(Chain):
    """`forward(inputs [B, ...], noise) → logits [B, classes]`; each entry of `hidden` is a block of two
    layers.

    config: of it `hidden`, the width of each block, `dropout`, after each block, and `bias`. classes: of the
    targets. shape: of one sample, without the batch.
    """

    def __init__(self, config: MLPConfig, classes: int, shape: Sequence[int]) -> None:
        hidden, dropout, bias = config.hidden, config.dropout, config.bias
        widths = (math.prod(shape), *hidden)
        super().__init__(
            MLPStem(),
            nn.ModuleList(
                MLPBlock(width, inner, dropout, bias) for width, inner in zip(widths, hidden, strict=False)
            ),
            MLPHead(widths[-1], classes, bias),
            Anatomy(
                splits={"blocks.*.up": Split.COLUMN, "blocks.*.down": Split.ROW},
                divides={f"hidden width of block {n}": width for n, width in enumerate(hidden)},
            ),
        )

    def initial_rules(self) -> Mapping[str, Rule]:
        """Normal with variance 2 / fan-in before an activation (He et al., 2015), 1 / fan-in in the head."""
        rules: dict[str, Rule] = {}
        for name, parameter in self.named_parameters():
            gain = 1.0 if name.startswith("head.") else 2.0
            rules[name] = (
                ("zeros", 0.0) if parameter.dim() < 2 else ("normal", math.sqrt(gain / parameter.shape[1]))
            )
        return rules
