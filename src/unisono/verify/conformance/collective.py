"""What every collective owes: the operation's result on every rank, the same bits of a sum, and the bytes declared."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Algorithm, Collective, Pending
from unisono.comm.collectives.engine import Engine
from unisono.comm.threads import run
from unisono.comm.tree import tree_sum
from unisono.spec.fidelity import Fidelity

PARTS = (4, 6_000)  # elements of a part: a small sum and a large one


@dataclass(frozen=True, slots=True)
class _Done:
    """One operation on one rank: what came of it, bytes that it sent, those that it declares, and whether
    all of those leave."""

    name: str
    out: Tensor
    sent: int
    declared: int
    counted: bool


def faults(collective: Collective, folder: Path, text: str) -> Iterator[str]:
    """1. On 2 and 3 ranks every operation gives what it means; a sum the same bits on all. 2. Sums declared EXACT
    are those of the tree over the ranks. 3. It sends what it declares; what goes through memory, no more."""
    for size in (2, 3):
        ranks = run(size, lambda rank, size=size: _operations(collective, rank, size))
        for at, (name, *_) in enumerate(_expected(0, size)):
            for rank, did in enumerate(ranks):
                _, wanted, exact = _expected(rank, size)[at]
                where = f"{size} ranks, {name}, rank {rank}"
                exact = exact or collective.fidelity is Fidelity.EXACT
                if not (torch.equal if exact else torch.allclose)(did[at].out, wanted):
                    yield f"{where}: another result than it means"
                elif (
                    "reduce" in name
                    and "scatter" not in name
                    and not torch.equal(did[at].out, ranks[0][at].out)
                ):
                    yield f"{where}: other bits of the sum than rank 0's"
                sent, declared = did[at].sent, did[at].declared
                if sent > declared + 64 * size or (did[at].counted and sent < declared - 64 * size):
                    yield f"{where}: it sends {sent} bytes and declares {declared}"


def _drawn(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _expected(rank: int, size: int) -> list[tuple[str, Tensor, bool]]:
    """(operation, its result on this rank, whether it has only one) of each that `_operations` does."""
    found: list[tuple[str, Tensor, bool]] = []
    for part in PARTS:
        each = [_drawn(other, part * size) for other in range(size)]
        dealt = torch.cat([x.chunk(size)[rank] for x in each])
        found += [
            (f"all_reduce of {part * size}", tree_sum(each), False),
            (f"all_reduce of a buffer of {part * size}", tree_sum(each), False),
            (f"all_reduce to the greatest of {part * size}", torch.stack(each).amax(0), True),
            (f"all_gather of {part}", torch.cat([x[:part] for x in each]), True),
            (f"all_gather of {part}, later", torch.cat([x[:part] for x in each]), True),
            (f"all_to_all of {part * size}", dealt, True),
            (f"reduce_scatter of {part * size}", tree_sum(dealt.chunk(size)), False),
        ]
    return found


def _operations(collective: Collective, rank: int, size: int) -> list[_Done]:
    pg: Any = dist.new_group(list(range(size)), use_local_synchronization=True)
    counter = _Counter(pg, size)
    algorithm, done = collective.bind(pg, "dp"), []
    total, greatest = dist.ReduceOp.SUM, dist.ReduceOp.MAX

    def did(
        name: str,
        op: str,
        x: Tensor,
        act: Callable[[Algorithm], tuple[Tensor, Pending | None]],
        *,
        later: bool,
    ):
        by = algorithm.pick(op, x, later)
        before = counter.sent
        out, pending = act(by)
        if pending is not None:
            pending.wait()
        done.append(
            _Done(name, out, counter.sent - before, by.member.sent(op, x.nbytes, size), by.member.counted)
        )

    for part in PARTS:
        whole, mine = _drawn(rank, part * size), _drawn(rank, part * size)[:part].clone()
        buffer = algorithm.buffer(part * size, whole).copy_(whole)
        shared, most = whole.clone(), whole.clone()
        out, late, dealt = (torch.empty_like(whole) for _ in range(3))
        scattered = torch.empty_like(mine)
        did("sum", "all_reduce", shared, lambda by, x=shared: (x, by.all_reduce(x, total)), later=False)
        did("sum", "all_reduce", buffer, lambda by, x=buffer: (x, by.all_reduce(x, total)), later=True)
        did("max", "all_reduce", most, lambda by, x=most: (x, by.all_reduce(x, greatest)), later=False)
        did("gather", "all_gather", mine, lambda by, x=mine, o=out: (o, by.all_gather(o, x)), later=False)
        did(
            "gather",
            "all_gather",
            mine,
            lambda by, x=mine, o=late: (o, by.all_gather(o, x, True)),
            later=True,
        )
        did("deal", "all_to_all", whole, lambda by, x=whole, o=dealt: (o, by.exchange(o, x)), later=False)
        did(
            "part",
            "all_to_all",
            whole,
            lambda by, x=whole, o=scattered: (o, by.reduce_scatter(o, x)),
            later=False,
        )
    return done


class _Counter:
    """Counts bytes that a process group sends: messages as they are, its own collectives by the engine's count."""

    def __init__(self, pg: Any, size: int) -> None:
        self.sent, self._size = 0, size
        own = (
            ("allreduce", "all_reduce"),
            ("all_gather_single", "all_gather"),
            ("all_to_all_single", "all_to_all"),
        )
        for name, op in (("send", ""), *own):
            setattr(pg, name, self._counted(getattr(pg, name), op))

    def _counted(self, call: Callable[..., Any], op: str) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            tensors: Sequence[Tensor] = (
                args[0] if isinstance(args[0], list) else [args[-1] if op else args[0]]
            )
            if op in ("all_gather", "all_to_all"):  # (output, input, ...)
                tensors = [args[1]]
            nbytes = sum(x.nbytes for x in tensors)
            self.sent += Engine().sent(op, nbytes, self._size) if op else nbytes
            return call(*args, **more)

        return counted
