"""A world of any size of which one rank is here: its groups have all their members, and nobody answers.

What a rank sends depends on its plan alone, so its own code can be run without the others: on the meta device, whose
tensors have shapes and no numbers, there is nothing to be received either. Each call of a group is written down.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from unisono.comm.device import IMAGINED

TIMEOUT = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Made:
    """One call of a process group. group: its name, the same on all its ranks. op: as `Group` calls it; `arrived` where
    a receive is waited for. nbytes: of the whole tensor that is added up, dealt, exchanged or brought together; of a
    message, the message. peer: of a message, a rank. ranks: of the group. axis: what the group is called."""

    group: str
    op: str
    nbytes: int
    peer: int = -1
    ranks: tuple[int, ...] = ()
    axis: str = ""


class _Over(dist.Work):
    """An operation that is over. waited: called when it is waited for."""

    def __init__(self, waited: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._waited = waited

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._waited()
        return True

    def is_completed(self) -> bool:
        return True


class ImaginedGroup(dist.ProcessGroup):
    """The group of one rank; outputs stay as they are."""

    def __init__(self, name: str, ranks: Sequence[int], index: int, calls: list[Made]) -> None:
        super().__init__(index, len(ranks))  # type: ignore[call-arg]
        self._name, self._ranks, self._calls = name, tuple(ranks), calls

    def getBackendName(self) -> str:
        return IMAGINED

    def getGroupName(self) -> str:
        return self._name

    def _record(self, op: str, tensors: Sequence[Tensor], peer: int = -1) -> _Over:
        call = Made(self._name, op, sum(x.nbytes for x in tensors), peer, self._ranks)
        self._calls.append(call)
        if op != "recv":
            return _Over()
        return _Over(lambda: self._calls.append(replace(call, op="arrived")))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Over:
        return self._record("all_reduce", tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Over:
        return self._record("broadcast", tensors)

    def barrier(self, opts: Any = None) -> _Over:
        return _Over()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Over:
        return self._record("all_gather", [output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Over:
        return self._record("reduce_scatter", [input])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> _Over:
        return self._record("all_to_all", [input])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Over:
        return self._record("all_gather", outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Over:
        return self._record("reduce_scatter", inputs)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Over:
        return self._record("send", tensors, self._ranks[to])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Over:
        return self._record("recv", tensors, self._ranks[source])


@contextmanager
def imagined(rank: int, world: int) -> Iterator[list[Made]]:
    """While this lasts, this process is that rank of a world of that size; gives the calls of all its groups, in order.

    Raises RuntimeError in a process that has joined a world already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of another world already")
    calls: list[Made] = []

    def group(options: Any, _: Any) -> ImaginedGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(world))  # none means all
        return ImaginedGroup(options.group_id, ranks, options.group_rank, calls)

    before = c10d._world, torch.get_rng_state()
    dist.Backend.register_backend(IMAGINED, group, extended_api=True, devices=["cpu", "meta"])
    try:
        dist.init_process_group(
            IMAGINED, store=dist.HashStore(), rank=rank, world_size=world, timeout=TIMEOUT
        )
        yield calls
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_rng_state(before[1])
