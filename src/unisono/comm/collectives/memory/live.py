"""Buffers that the ranks of one host all have in their memory: a sum over them sends nothing.

Each rank makes an anonymous file in memory and maps those of the others; two small collectives say when all gradients
are there and when all sums are. Between them each rank adds up its part of everybody's buffer and writes the sum to
all: a pass through memory, where messages over loopback copy everything four times.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.collectives import Collective, Pending
from unisono.comm.collectives.engine.live import EngineAlgorithm
from unisono.comm.collectives.messages.live import InFlight, agreed
from unisono.comm.device import between_cpus, is_apart

_NAME = "unisono-buffer"
_HEAD = 4096  # bytes before the numbers; the first eight are a token that tells the file from any other
_PIECE = 1 << 15  # elements of a sum that fit into the CPU's second cache
_LINE = 16  # elements, so that no two ranks write to one line of a cache


@dataclass(slots=True)
class Meeting:
    """A sum under way over `buffers`, one a member, in order; `index` is this rank's. A pending operation."""

    pg: dist.ProcessGroup
    buffers: Sequence[Tensor]
    index: int
    there: InFlight

    def wait(self) -> None:
        """Returns when the sum is in everybody's buffer, the same bits in all. Raises what the group's collectives
        raise where a member is gone or late."""
        self.there.wait()
        own, *others = (self.buffers[(self.index + i) % len(self.buffers)] for i in range(len(self.buffers)))
        part = part_of(own.numel(), self.index, len(self.buffers))
        with torch.no_grad():
            for at in range(part.start, part.stop, _PIECE):
                piece = slice(at, min(at + _PIECE, part.stop))
                total = own[piece]
                for other in others:
                    total.add_(other[piece])
                for other in others:
                    other[piece].copy_(total)
        agreed(self.pg).wait()


class MemoryAlgorithm(EngineAlgorithm):
    """Sums of whole buffers by a meeting; every other operation as the engine does it."""

    def __init__(self, member: Collective, pg: dist.ProcessGroup) -> None:
        super().__init__(member, pg)
        self._buffers: dict[int, tuple[Tensor, ...]] = {}  # by address: a buffer of every member

    def near(self, device: torch.device) -> bool:
        return not is_apart(device)

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        buffers = mapped(self.pg, numel, like.dtype) if self.near(like.device) else None
        if buffers is None:
            return super().buffer(numel, like)
        own = buffers[self.pg.rank()]
        self._buffers[own.data_ptr()] = buffers
        return own

    def holds(self, x: Tensor) -> bool:
        """Whether x is the whole of such a buffer."""
        buffers = self._buffers.get(x.data_ptr())
        return buffers is not None and buffers[self.pg.rank()].numel() == x.numel()

    def all_reduce(self, x: Tensor, op: Any) -> Pending:
        if op == dist.ReduceOp.SUM and self.holds(x):
            return Meeting(self.pg, self._buffers[x.data_ptr()], self.pg.rank(), agreed(self.pg))
        return super().all_reduce(x, op)


def sees_all(pg: dist.ProcessGroup) -> bool:
    """Whether all members are on one host and see each other's memory. Every member of the group calls it, or it
    hangs."""
    return between_cpus(pg) and mapped(pg, 1, torch.uint8) is not None


def part_of(numel: int, index: int, size: int) -> slice:
    """The elements that one member adds up, of `numel`."""
    lines = -(-numel // _LINE)
    begin, end = (min(numel, lines * i // size * _LINE) for i in (index, index + 1))
    return slice(begin, end)


def mapped(pg: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """Zeros [numel] of every member, in order, which each member sees; None, for all of them, where one cannot: another
    host or network, no such memory. Every member of the group calls it, or it hangs."""
    size, index = pg.size(), pg.rank()
    nbytes = _HEAD + numel * dtype.itemsize
    token = secrets.randbits(62)
    file = _made(nbytes, token)
    offers = torch.zeros(size, 4, dtype=torch.int64)
    offers[index] = torch.tensor([os.getpid(), file, token, _network()])
    pg.allreduce([offers]).wait()
    maps = [_opened(offer, nbytes) for offer in offers.tolist()]
    votes = torch.tensor([float(all(one is not None for one in maps))])
    pg.allreduce([votes]).wait()  # by then everybody has opened what there is
    if file >= 0:
        os.close(file)
    if votes.item() < size:
        return None
    return tuple(one[_HEAD:].view(dtype) for one in maps if one is not None)


def _made(nbytes: int, token: int) -> int:
    """An anonymous file of so many bytes, which begins with the token; -1 where the system has none."""
    try:
        file = os.memfd_create(_NAME)
    except (AttributeError, OSError):
        return -1
    try:
        os.ftruncate(file, nbytes)
        os.pwrite(file, token.to_bytes(8, "little"), 0)
    except OSError:
        os.close(file)
        return -1
    return file


def _opened(offer: Sequence[int], nbytes: int) -> Tensor | None:
    """What a process made, as bytes, if it is on this host and lets us. offer: process, file, token, network."""
    pid, file, token, network = offer
    path = f"/proc/{pid}/fd/{file}"
    # In another container the same numbers may be those of any file, which must not be touched.
    with suppress(OSError, RuntimeError):
        if network == _network() and _NAME in os.readlink(path) and os.stat(path).st_size == nbytes:
            found = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            if int.from_bytes(found[:8].numpy().tobytes(), "little") == token:
                return found
    return None


def _network() -> int:
    """The number of this process's network: ranks in two of them are on two hosts, if only to the eye."""
    with suppress(OSError):
        return Path("/proc/self/ns/net").stat().st_ino
    return 0
