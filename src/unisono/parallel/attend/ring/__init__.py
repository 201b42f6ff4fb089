"""Ring attention (Liu et al., Ring Attention with Blockwise Transformers, 2023); see `live`."""

from typing import TYPE_CHECKING

from unisono.parallel.attend import ContextWay

if TYPE_CHECKING:
    from torch import nn

    from unisono.comm.group import Group


class RingWay(ContextWay):
    """Keys and values go round from rank to rank, while each attends to those that it has."""

    name = "ring"

    def bind(self, core: "nn.Module", group: "Group", positions: int) -> "nn.Module":
        from unisono.parallel.attend.ring.live import Ring
        from unisono.parallel.online import OnlineCore

        places = [self.places(positions, i, group.size) for i in range(group.size)]
        return OnlineCore(core, Ring(group), places, group.index)
