"""All keys and values are gathered (Grattafiori et al., The Llama 3 Herd of Models, 2024); see `live`."""

from typing import TYPE_CHECKING

from unisono.parallel.attend import ContextWay

if TYPE_CHECKING:
    from torch import nn

    from unisono.comm.group import Group


class GatherWay(ContextWay):
    """Each rank gathers all keys and values, attends, and forgets them; backward gathers them again."""

    name = "gather"

    def bind(self, core: "nn.Module", group: "Group", positions: int) -> "nn.Module":
        from unisono.parallel.attend.gather.live import Gathered
        from unisono.parallel.online import OnlineCore

        places = [self.places(positions, i, group.size) for i in range(group.size)]
        return OnlineCore(core, Gathered(group), places, group.index)
