"""Who computes the step of a matrix that ranks hold in parts or in copies: one of them, its owner.

Some steps need a whole matrix, such as Muon's. All ranks that hold parts or copies of a matrix are a group. Once an
update, each part of a gradient goes to the matrix' owner, which computes; then each rank gets its part of the step.
So as many steps are computed by the whole group as by one device. Who owns which matrix says `programs.owners`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm.group import Group
from unisono.comm.mesh import Mesh
from unisono.parallel.experts import exchange_rows
from unisono.parallel.params import Slot
from unisono_contrib.programs.owners import assign

NUMBERS = 5  # by which a rank says what it holds of a matrix: replica, first row and column, rows and columns


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """What one rank holds of one matrix: `shape` from `start` on. replica: its coordinate on `dp`."""

    replica: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """This part of a whole matrix, a view."""
        for dim, (first, size) in enumerate(zip(self.start, self.shape, strict=True)):
            whole = whole.narrow(dim, first, size)
        return whole


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of the group. owner: a place in the group. parts: of each member. senders: members whose parts make up
    the whole, in the owner's own replica."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    owner: int
    parts: tuple[MatrixPart, ...]
    senders: frozenset[int]


@dataclass(frozen=True, slots=True)
class Owners:
    """The matrices of one live optimiser on one rank, in the order that all members of the group have."""

    group: Group
    matrices: Mapping[nn.Parameter, Matrix]

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this rank computes the parameter's step."""
        return self.matrices[parameter].owner == self.group.index

    def gather(self, parts: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Whole matrices of those that are owned here. parts: what this rank holds of each, all of one dtype. Every
        member of the group calls it, with the same matrices, or it hangs."""
        if self.group.size == 1:
            return dict(parts)
        size, me = self.group.size, self.group.index
        known = [self.matrices[p] for p in parts]
        to = [[m for m in known if m.owner == other and me in m.senders] for other in range(size)]
        come = [[m for m in known if m.owner == me and other in m.senders] for other in range(size)]
        flat = [parts[m.parameter].reshape(-1) for line in to for m in line]
        out = self._exchange(
            flat,
            [sum(m.parts[me].numel for m in line) for line in to],
            [sum(m.parts[other].numel for m in line) for other, line in enumerate(come)],
            next(iter(parts.values())),
        )
        wholes = {m.parameter: out.new_empty(m.shape) for m in known if m.owner == me}
        places = [(m, m.parts[other]) for other, line in enumerate(come) for m in line]
        for (m, part), x in zip(places, out.split([part.numel for _, part in places]), strict=True):
            part.of(wholes[m.parameter]).copy_(x.view(part.shape))
        return wholes

    def scatter(
        self, wholes: Mapping[nn.Parameter, Tensor], like: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """This rank's part of each matrix of `like`. wholes: of those that are owned here. like: tensors of the dtype
        in which they travel. Every member of the group calls it, with the same matrices, or it hangs."""
        if self.group.size == 1:
            return dict(wholes)
        size, me = self.group.size, self.group.index
        known = [self.matrices[p] for p in like]
        flat = [
            m.parts[other].of(wholes[m.parameter]).reshape(-1)
            for other in range(size)
            for m in known
            if m.owner == me
        ]
        come = [m for other in range(size) for m in known if m.owner == other]
        out = self._exchange(
            flat,
            [sum(m.parts[other].numel for m in known if m.owner == me) for other in range(size)],
            [sum(m.parts[me].numel for m in known if m.owner == other) for other in range(size)],
            next(iter(like.values())),
        )
        pieces = out.split([m.parts[me].numel for m in come])
        return {m.parameter: x.view(m.parts[me].shape) for m, x in zip(come, pieces, strict=True)}

    def _exchange(self, flat: Sequence[Tensor], to: list[int], come: list[int], like: Tensor) -> Tensor:
        x = torch.cat(list(flat)) if flat else like.new_empty(0)
        return exchange_rows(x, to, come, self.group)


@runtime_checkable
class SharedSteps(Protocol):
    """A live optimiser whose matrices' steps can be divided over ranks."""

    param_groups: list[dict[str, Any]]

    def cost(self, shape: Sequence[int]) -> float:
        """Of one matrix' step, to compare matrices."""
        ...

    def share(self, owners: Owners, over_dp: bool) -> None:
        """Let `owners` say who computes which matrix. over_dp: whether they are of several replicas."""
        ...


def share_matrices(optimizer: Optimizer, slots: Sequence[Slot], mesh: Mesh, over_dp: bool) -> None:
    """Divide the steps of whole matrices over the ranks of this stage. over_dp: over those of other replicas too, which
    hold copies. Every rank of the stage calls it, or it hangs."""
    axes = (*(("dp",) if over_dp else ()), "shard", "cp", "tp")
    group = mesh.group("owners", axes)
    by_master = {slot.master: slot for slot in slots}
    for part in getattr(optimizer, "parts", (optimizer,)):
        if isinstance(part, SharedSteps):
            params = [p for of_group in part.param_groups for p in of_group["params"]]
            part.share(_owners(group, [by_master[p] for p in params], mesh.at["dp"], part.cost), over_dp)


def _owners(
    group: Group, slots: Sequence[Slot], replica: int, cost: Callable[[Sequence[int]], float]
) -> Owners:
    """Every member of the group calls it, or it hangs."""
    table = _table(group, slots, replica)
    owners = assign([cost(slot.shape) for slot in slots], group.size)
    matrices: dict[nn.Parameter, Matrix] = {}
    for i, (slot, owner) in enumerate(zip(slots, owners, strict=True)):
        parts = tuple(MatrixPart(line[i][0], line[i][1:3], line[i][3:]) for line in table)
        first: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for rank, part in enumerate(parts):
            if part.replica == parts[owner].replica and part.numel:
                first.setdefault((part.start, part.shape), rank)
        matrices[slot.master] = Matrix(slot.master, slot.shape, owner, parts, frozenset(first.values()))
    return Owners(group, matrices)


def _table(group: Group, slots: Sequence[Slot], replica: int) -> list[list[tuple[int, ...]]]:
    """What each member holds of each matrix, as `NUMBERS` numbers."""
    lines = [[replica, *slot.start, *slot.master.shape] for slot in slots]
    if not lines:
        return [[] for _ in range(group.size)]
    here = torch.tensor(lines, dtype=torch.int64, device=slots[0].master.device)
    flat = group.all_gather(here.view(1, -1)).view(group.size, len(slots), NUMBERS).tolist()
    return [[tuple(numbers) for numbers in line] for line in flat]
