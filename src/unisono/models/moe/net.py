"""A gpt whose feed-forward layers, or some of them, are many experts. It knows nothing of parallelism.

Shapes: B batch, T positions, D width.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from unisono.models.gpt.net import GPT, Block, FeedForward
from unisono.models.init import Rule
from unisono.models.moe import MoEConfig
from unisono.models.moe.dispatch import Dispatch, ExpertStack
from unisono.models.moe.routing import Router
from unisono.models.noise import Noise
from unisono.spec.layout import Anatomy, Split


class SparseLayer(nn.Module):
    """x [B, T, D] → [B, T, D]: of each token the weighed sum of its experts, and of those that all take."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = ExpertStack(config)
        self.dispatch = Dispatch()
        width = config.n_shared_experts * config.expert_width
        self.shared = FeedForward(config, width) if width else None

    def forward(self, x_BTD: Tensor, noise: Noise | None) -> Tensor:
        y_BTD = self.dispatch(x_BTD, self.router(x_BTD, noise), self.experts)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class SparseBlock(Block):
    """A block with a sparse layer."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.mlp = SparseLayer(config)  # type: ignore[assignment]

    def forward(self, x_BTD: Tensor, noise: Noise | None = None) -> Tensor:
        x_BTD = x_BTD + self.drop1(self.attn(self.norm1(x_BTD), noise), noise)
        return x_BTD + self.drop2(self.mlp(self.norm2(x_BTD), noise), noise)


class MoE(GPT):
    """Stem, blocks, head; `forward(tokens [B, T] int64, noise) → logits [B, T, V]`."""

    def __init__(self, config: MoEConfig) -> None:
        kinds = (SparseBlock if config.sparse(i) else Block for i in range(config.n_layer))
        super().__init__(config, [kind(config) for kind in kinds])
        self.anatomy = with_experts(self.anatomy)

    def initial_rules(self) -> Mapping[str, Rule]:
        """As a gpt's; what experts write into the residual stream is as small as a dense layer's."""
        rules, small = dict(super().initial_rules()), 0.02 / math.sqrt(2 * self.config.n_layer)
        for name in rules:
            if name.endswith(("experts.down", "shared.down.weight")):
                rules[name] = ("normal", small)
        return rules


def with_experts(anatomy: Anatomy) -> Anatomy:
    """A gpt's, and what may be cut of a sparse layer."""
    splits = {
        "blocks.*.mlp.router": Split.ROUTER,
        "blocks.*.mlp.experts": Split.EXPERTS,
        "blocks.*.mlp.shared.up": Split.COLUMN,
        "blocks.*.mlp.shared.gate": Split.COLUMN,
        "blocks.*.mlp.shared.down": Split.ROW,
    }
    return replace(anatomy, splits={**anatomy.splits, **splits})
