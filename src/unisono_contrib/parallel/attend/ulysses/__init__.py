"""Exchange of positions for heads (Jacobs et al., DeepSpeed Ulysses, 2023); see `live`."""

from typing import TYPE_CHECKING

from unisono.parallel.attend import ContextWay

if TYPE_CHECKING:
    from torch import nn

    from unisono.comm.group import Group


class UlyssesWay(ContextWay):
    """Ranks exchange positions for heads: each attends over all positions with some heads, and they exchange back."""

    name = "ulysses"
    balanced = False
    by_heads = True

    def bind(self, core: "nn.Module", group: "Group", positions: int) -> "nn.Module":
        from unisono_contrib.parallel.attend.ulysses.live import ExchangedCore

        return ExchangedCore(core, group)
