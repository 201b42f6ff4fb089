"""Two copies of the model in one pipeline (DualPipe): each serves half of the micro-batches, and they learn as one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.parallel.params import Slot, nothing_for
from unisono.parallel.ties import Tie
from unisono.programs.pipeline import Timetable

AT_ONCE = 25 << 20  # bytes of gradients that are sent as one tensor


@dataclass(frozen=True, slots=True)
class Mirror:
    """What a rank shares with the one other rank that holds the same parameters. here: this rank's slots, in an order
    that both have; empty where the model is there once."""

    here: tuple[Slot, ...]
    group: Group | None

    @torch.no_grad()
    def add_up(self, slots: Iterable[Slot], ties: Iterable[Tie] = ()) -> None:
        """Sum the gradients of both copies, in place. A parameter that neither copy has used keeps no gradient; where
        one has, zeros stand for the other's. slots: those that learn. ties: whose two uses are added up already, where
        both are here. Both ranks call it, or it hangs."""
        done = {id(tie.here[1]) for tie in ties if len(tie.here) == 2}
        learning = {id(slot) for slot in slots} - done
        masters = [slot.master for slot in self.here if id(slot) in learning]
        if self.group is None or not masters:
            return
        for part in _parts(masters):
            absent = [p.grad is None for p in part]
            grads = [nothing_for(p) if p.grad is None else p.grad for p in part]
            lacks = grads[0].new_tensor([any(absent)])
            flat = self.group.all_reduce(torch.cat([*(grad.flatten() for grad in grads), lacks]))
            *summed, lacking = flat.split([*(grad.numel() for grad in grads), 1])
            unused = [False] * len(part)
            if lacking:
                unused = (self.group.all_reduce(lacks.new_tensor(absent)) == 2).tolist()
            for p, grad, both, drop in zip(part, grads, summed, unused, strict=True):
                p.grad = None if drop else grad.copy_(both.view_as(grad))


ALONE = Mirror((), None)


def _parts(masters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """In their order, as many at once as `AT_ONCE` holds."""
    parts: list[list[nn.Parameter]] = []
    room = 0
    for p in masters:
        if not parts or room < p.nbytes:
            parts.append([])
            room = AT_ONCE
        parts[-1].append(p)
        room -= p.nbytes
    return parts


def mirror_of(slots: Sequence[Slot], timetable: Timetable, mesh: Mesh) -> Mirror:
    """The mirror of a rank, where the timetable has the model twice: row r holds what the row as far from the other end
    does."""
    if timetable.chains == 1:
        return ALONE
    rows = (mesh.at["pp"], len(timetable.rows) - 1 - mesh.at["pp"])
    ranks = {mesh.members.ranks[mesh.shape.rank({**mesh.at, "pp": row})] for row in rows}
    return Mirror(tuple(sorted(slots, key=lambda slot: slot.name)), mesh.group_across("pp", sorted(ranks)))
