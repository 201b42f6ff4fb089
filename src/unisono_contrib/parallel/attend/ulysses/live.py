"""One exchange before attention, one after it; each is the other's way back.

Shapes: B batch, t this rank's positions, T all, H query heads, G key/value heads, h and g those of them that one rank
attends with, K head width, n ranks.
"""

import torch
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.models.noise import Noise
from unisono.parallel.tensor import Crossing


def exchanged(parts: Tensor, group: Group) -> Tensor:
    """[n, ...] → [n, ...]: part i goes to rank i, and what came from rank i stands in its place. Without a gradient."""
    with group.recorder.span("comm", axis=group.axis, op="all_to_all", exposed=True):
        out, pending = group.start_exchange(parts.contiguous().view(-1))
        pending.wait()
    return out.view(parts.shape)


def cross(parts: Tensor, group: Group) -> Tensor:
    """Exchange parts; gradients go the same way."""
    return Crossing.apply(parts, group, exchanged, exchanged, parts.dtype)  # type: ignore[return-value]


class ExchangedCore(nn.Module):
    """`core` with some heads over all positions, in the place of all heads over some."""

    def __init__(self, core: nn.Module, group: Group) -> None:
        super().__init__()
        self.core, self.group = core, group

    def forward(self, q_BHtK: Tensor, k_BGtK: Tensor, v_BGtK: Tensor, noise: Noise | None) -> Tensor:
        n, (B, H, t, K) = self.group.size, q_BHtK.shape
        h, g = H // n, k_BGtK.shape[1] // n
        dealt = [x.reshape(B, n, -1, t, K) for x in (q_BHtK, k_BGtK, v_BGtK)]
        parts_nBmtK = torch.cat(dealt, 2).movedim(1, 0)  # m: heads of all three
        came_nBmtK = cross(parts_nBmtK, self.group)
        all_BmTK = came_nBmtK.permute(1, 2, 0, 3, 4).reshape(B, h + 2 * g, n * t, K)
        y_BhTK = self.core(*all_BmTK.split((h, g, g), 1), noise)
        back_nBhtK = y_BhTK.view(B, h, n, t, K).permute(2, 0, 1, 3, 4)
        home_nBhtK = cross(back_nBhtK, self.group)
        return home_nBhtK.movedim(0, 1).reshape(B, H, t, K)
