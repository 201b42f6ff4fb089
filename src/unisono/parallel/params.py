"""The parameters of one rank: their logical names, and which box of the full tensor lies here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.comm.group import Group
from unisono.comm.mesh import AXES, Mesh
from unisono.parallel.parts import Cut, Dealt

NO_AXES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of this rank.

    name: logical, the same under every plan. live: what autograd differentiates (a DTensor under FSDP2).
    master: the plain local tensor that the optimiser steps; it shares `live`'s storage, unless `live` is rounded.
    shape: of the full tensor. start: where the master's box begins in it.
    sum_over: axes of the replica over which a gradient here is one rank's part of a sum. repeated_on: axes of the
    replica whose ranks all hold this same box, such as a norm's weight on `tp`.
    alias: a second use of a tied weight, updated together with its owner and counted there.
    copy: of a pipeline's second copy of the model, or of experts or tables that a rank before holds too; the first one
    counts.
    lazy: rows without a gradient are not stepped. sparse: its gradient holds the rows that were read alone.
    """

    name: str
    live: nn.Parameter
    master: nn.Parameter
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sum_over: frozenset[str] = NO_AXES
    repeated_on: frozenset[str] = NO_AXES
    alias: bool = False
    copy: bool = False
    lazy: bool = False
    sparse: bool = False

    def counted(self, at: Mapping[str, int]) -> bool:
        """Whether the rank at these coordinates is the one of its replica whose box counts, in the norm of the whole
        model and in checkpoints."""
        return not self.alias and not self.copy and not any(at[axis] for axis in self.repeated_on)

    def take_gradient(self) -> None:
        """Point the master's gradient at what backward left on the live parameter."""
        if self.master is self.live:
            return
        grad = self.live.grad
        self.master.grad = None if grad is None else local_of(grad).detach()

    def drop_gradient(self) -> None:
        """Forget the gradient; the next backward makes a new one."""
        self.live.grad = None
        self.master.grad = None


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def dense_of(grad: Tensor) -> Tensor:
    """A gradient with all its rows, those that were not read as zeros."""
    return grad.to_dense() if grad.is_sparse else grad


def nothing_for(p: nn.Parameter) -> Tensor:
    """Zeros in the place of a gradient, in its dtype, which need not be the parameter's."""
    return torch.zeros_like(p, dtype=p.grad_dtype)


def add_up_in(live: nn.Parameter, dtype: torch.dtype) -> None:
    """Have the gradients of micro-batches added up in a wider dtype than the parameter's. Each of them has the
    parameter's precision, as it has where the parameter is gathered from shards: autograd would give that of an RMSNorm
    as it computes it, in float32."""
    live.grad_dtype = dtype
    if live.dim() == 1 and live.dtype != dtype:  # of larger ones products are rounded already
        narrow = live.dtype
        live.register_hook(lambda grad: grad.to(narrow).to(dtype))


def values_of(grad: Tensor) -> Tensor:
    """A gradient's own numbers, without rows that were not read; in place."""
    return grad.values() if grad.is_sparse else grad


@torch.no_grad()
def slots_of(
    stage: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
    mesh: Mesh,
    sequence: bool,
    aliases: frozenset[str],
    copy: bool = False,
    dealt: Mapping[str, Dealt] = MappingProxyType({}),
    masters: Mapping[str, nn.Parameter] = MappingProxyType({}),
    *,
    states: Group | None = None,
    added_up: bool = False,
) -> list[Slot]:
    """The slots of a built stage, in the model's own order.

    shapes: full shape of every logical name. cuts: what `tp` took. sequence: whether parameters that `tp` leaves
    whole see only a slice of the positions, as those of a model with attention do. aliases: names that are a second use
    of a weight owned elsewhere. copy: see `Slot`. dealt: this rank's parts of experts. masters: of parameters that
    modules hold rounded. states: whoever FSDP2 has dealt them to, `mesh.states` if None. added_up: backward has added
    up what ranks of `tp` and `cp` make.
    """
    slots, states = [], states or mesh.states
    for name, live in stage.named_parameters():
        shape = shapes[name]
        start = [0] * len(shape)
        part, cut = dealt.get(name), cuts.get(name)
        for piece in part.cuts if part else [cut] if cut else []:
            start[piece.dim] = piece.start
        master = masters.get(name, live)
        if isinstance(live, DTensor):
            start[0] += _first_row(live.shape[0], states)
            master = nn.Parameter(live.to_local().detach(), requires_grad=live.requires_grad)
            master.grad_dtype = live.grad_dtype
        if part is not None:
            slot = Slot(name, live, master, shape, tuple(start), alias=name in aliases, copy=copy)
            slots.append(_held_alike(slot, part))
            continue
        whole = frozenset({"tp"} if mesh.tp.size > 1 and cut is None else ())
        seen = _seen_alone(live, mesh, states)
        sums = NO_AXES if added_up else (whole if sequence else NO_AXES) | seen
        box, alias = tuple(start), name in aliases
        slots.append(Slot(name, live, master, shape, box, sums, whole | seen, alias, copy))
    return slots


def _seen_alone(live: nn.Parameter, mesh: Mesh, states: Group) -> frozenset[str]:
    """Each rank of cp has seen some positions alone; where shard deals the tensor, its scattered sum is over cp too."""
    summed = isinstance(live, DTensor) and states is mesh.states
    return frozenset({"cp"} if mesh.cp.size > 1 and not summed else ())


def _first_row(rows: int, states: Group) -> int:
    """The first row of this rank's part of a tensor that FSDP2 has dealt out, by torch.chunk's rule."""
    return min(-(-rows // states.size) * states.index, rows)


def _held_alike(slot: Slot, part: Dealt) -> Slot:
    """With the ranks that hold this part too."""
    over = frozenset({part.sum_over}) if part.group.size > 1 else NO_AXES
    axes = over & frozenset(AXES)  # of a group that is no axis of the mesh, coordinates say nothing
    twice = slot.copy or (part.group.index > 0 and not axes)
    return replace(slot, sum_over=over, repeated_on=axes, copy=twice)
