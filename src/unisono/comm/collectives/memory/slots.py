"""Messages between ranks of one host through memory: the sender copies into a slot, the receiver out of it.

A word, sent as any message, says which slot; whoever waits for it sleeps. A byte in memory for each slot says whether
it is in use: the sender sets it, the receiver clears it once it has read. So nobody is asked whether a slot is free.
Where none is, the tensor itself follows the word.

That byte is memory's alone, so what is read must be read before it is cleared. x86 promises that (its stores are seen
after the loads before them); ARM and POWER do not, and Python has no fence to ask for it. There messages are sent.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.algorithm import Once, Pending
from unisono.comm.collectives.memory.mapping import mapped
from unisono.comm.collectives.messages.live import InFlight
from unisono.comm.device import between_cpus, is_apart
from unisono.comm.gone import started
from unisono.comm.group import Group
from unisono.comm.tags import SLOTS as WORDS
from unisono.comm.tags import WHOLES
from unisono.spec import words

LARGE = 2 << 20
"""Bytes of a message from which this is quicker than to send it (`unisono bench net`)."""
SLOTS = 4  # of a rank, for all that it sends in a group
_PLACES = 64  # bytes before the first slot: one for each that says whether it is in use


@dataclass
class _Leaving(InFlight):
    """A message that leaves. x: what must live until then."""

    x: tuple[Tensor, ...]


@dataclass
class _Arriving(Once):
    """A message that is to come into `out`."""

    slots: "MemorySlots"
    out: Tensor
    source: int
    word: Tensor
    coming: InFlight

    def end(self) -> None:
        self.coming.wait()
        self.slots._read(int(self.word), self.source, self.out)


class MemorySlots:
    """The slots of a group's members. each: bytes of every member, in the order of the process group."""

    def __init__(self, group: Group, each: Sequence[Tensor]) -> None:
        self._group, self._each, self._wholes = group, each, 0
        self._room = (each[0].numel() - _PLACES) // SLOTS
        self._pg: Any = group.pg

    def takes(self, x: Tensor) -> bool:
        """Whether x passes through memory: the same on both sides, for tensors of one size."""
        return LARGE <= x.nbytes <= self._room

    def says(self) -> str:
        """For the start of a run."""
        axis = self._group.axis
        return (
            f"memory for messages of {words.nbytes(LARGE)} and more: ranks of {axis} see each other's memory"
        )

    def start_send(self, x: Tensor, to: int) -> Pending:
        """As `Group.start_send`."""
        if not self.takes(x):
            return self._group.start_send(x, to)
        rank = self._group.ranks[to]
        self._group.recorder.count(self._group.axis, "send", x.nbytes)
        return started(self._pg, f"a send to rank {rank}", self._send, x, self._place(rank))

    def start_recv(self, out: Tensor, source: int) -> Pending:
        """As `Group.start_recv`."""
        if not self.takes(out):
            return self._group.start_recv(out, source)
        rank = self._group.ranks[source]
        return started(self._pg, f"a receive from rank {rank}", self._receive, out, self._place(rank))

    def _send(self, x: Tensor, to: int) -> _Leaving:
        mine = self._each[self._pg.rank()]
        slot = next((i for i in range(SLOTS) if not mine[i]), -1)
        if slot < 0:
            self._wholes = self._wholes % WHOLES.count + 1
            word = torch.tensor([-self._wholes])
            works = [self._pg.send([word], to, WORDS.first), self._pg.send([x], to, WHOLES.of(self._wholes))]
            return _Leaving(works, (word, x))
        with torch.no_grad():
            mine[slot] = 1
            self._slot(mine, slot, x).copy_(x)
        word = torch.tensor([slot])
        return _Leaving([self._pg.send([word], to, WORDS.first)], (word,))

    def _receive(self, out: Tensor, source: int) -> _Arriving:
        word = torch.zeros(1, dtype=torch.int64)
        coming = InFlight([self._pg.recv([word], source, WORDS.first)])
        return _Arriving(self, out, source, word, coming)

    def _read(self, word: int, source: int, out: Tensor) -> None:
        if word < 0:
            self._pg.recv([out], source, WHOLES.of(-word)).wait()
            return
        theirs = self._each[source]
        with torch.no_grad():
            out.copy_(self._slot(theirs, word, out))
            theirs[word] = 0

    def _slot(self, whole: Tensor, slot: int, like: Tensor) -> Tensor:
        at = _PLACES + slot * self._room
        return whole[at : at + like.nbytes].view(like.dtype).view(like.shape)

    def _place(self, rank: int) -> int:
        return dist.get_group_rank(self._pg, rank)


def keeps_order() -> bool:
    """Whether this processor lets no store be seen before a load that comes before it."""
    return os.uname().machine in ("x86_64", "i686", "i386")


def slots_of(group: Group, nbytes: int, device: torch.device) -> MemorySlots | None:
    """Slots for messages of up to `nbytes` bytes, the most that any member says. None, for all of them, where that is
    too little to be worth it, or where one does not see the others' memory. Every member calls it, or it hangs."""
    pg: Any = group.pg
    if pg is None or is_apart(device) or not between_cpus(pg) or not keeps_order():
        return None
    each_wants = torch.zeros(pg.size(), dtype=torch.int64)
    each_wants[pg.rank()] = nbytes
    started(pg, "the making of shared memory", pg.allreduce, [each_wants]).wait()
    most = int(each_wants.max())
    if most < LARGE:
        return None
    room = -(-most // 64) * 64
    each = mapped(pg, _PLACES + SLOTS * room, torch.uint8)
    return None if each is None else MemorySlots(group, each)
