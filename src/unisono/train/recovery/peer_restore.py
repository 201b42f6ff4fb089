"""The state of a run out of the memory of its ranks: what a checkpoint gives from disk, ranks give each other.

Each rank says what it holds: boxes of logical tensors, after which step; more than once where snapshots of earlier
steps lie beside, its own or those of whom it replaces. All go on after the newest step of which ranks together hold
everything, whoever holds something newer. Every rank gets the boxes that it wants, its own from itself, others from
whoever holds them. Old and new layout may differ, so that this serves a rank that takes a lost one's place, and a run
that goes on under another plan.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.train.recovery.snapshot_buffer import Snapshot
from unisono.train.state.checkpoint.boxes import Box, Extent, overlap

Held = dict[str, list[tuple[int, int, Extent]]]
"""Name of a tensor → (rank, number of the box there, the box) of all that is held of it."""


class Incomplete(Exception):
    """Nobody that is left holds all of what is wanted; the same on every rank."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A part of a tensor that goes from one rank's box to another's; `source` and `target` are the boxes' numbers."""

    source: int
    target: int
    part: Extent


class PeerRestore:
    """What all ranks hold, as a source to restore a run from. Every rank makes one, and calls `load` as often, then
    `end`; those that leave the run call `give` instead.

    store: a torch Store of this meeting alone. held: what this rank has, of no step twice; a rank that is new may have
    nothing. State is alike on all ranks that hold something of a step, as far as they say it. device: where messages of
    the default group have to lie.
    """

    def __init__(
        self, rank: int, world: int, store: Any, held: Sequence[Snapshot], device: torch.device
    ) -> None:
        self._rank, self._world, self._store, self._device, self._round = rank, world, store, device, 0
        snapshots = [snapshot for snapshot in held if snapshot.boxes]
        holdings = self._tell(
            "holds", [[s.step, s.state, s.live, list(map(_described, s.boxes))] for s in snapshots]
        )
        self.newest = max((step for lines in holdings for step, *_ in lines), default=-1)
        """After which the newest was held, whether all of it or not; -1 where nobody holds any."""
        while True:
            self.step = _covered(holdings)
            """After which the run goes on; -1 where nobody holds any."""
            mine = next((snapshot for snapshot in snapshots if snapshot.step == self.step), None)
            sound = self._tell(f"sound/{self._round}", mine is None or mine.sound())
            if all(sound):
                break
            self._round += 1
            snapshots = [snapshot for snapshot in snapshots if snapshot is not mine or sound[rank]]
            holdings = [
                [line for line in lines if good or line[0] != self.step]
                for lines, good in zip(holdings, sound, strict=True)
            ]
        self._boxes = mine.boxes if mine is not None else ()
        served = [(who, line) for who, lines in enumerate(holdings) for line in lines if line[0] == self.step]
        self.state: dict[str, Any] = {"step": self.step}
        for _, line in served:  # some say more than others
            self.state = {**line[1], **self.state}
        self.stood_in = [who for who, (_, _, live, _) in served if not live]
        """Ranks of whom a snapshot serves."""
        self._held, self._kinds = _index(holdings, self.step)

    def names(self) -> set[str]:
        """The names of all tensors that are held."""
        return set(self._held)

    def load(self, boxes: Sequence[Box]) -> dict[str, Any]:
        """Fill these boxes in place; returns the state. Every rank calls it. Raises Incomplete on all ranks."""
        self._round += 1
        if self._rank == 0:
            self._store.set(f"more/{self._round}", "1")
        wants = self._tell(f"wants/{self._round}", [_described(box) for box in boxes])
        moves = self._moves(wants)
        self._play(moves, boxes)
        return self.state

    def give(self) -> None:
        """Let the others load what is held here, as often as they do, and return when all have what they want."""
        with suppress(Incomplete):
            while self._store.get(f"more/{self._round + 1}") == b"1":
                self.load([])
            self._tell("had", True)

    def end(self) -> None:
        """Nothing more is loaded. Every rank that has loaded calls it."""
        if self._rank == 0:
            self._store.set(f"more/{self._round + 1}", "0")
        self._store.set(f"had/{self._rank}", "true")

    def _tell(self, what: str, said: Any) -> list[Any]:
        """What every rank says, in their order."""
        self._store.set(f"{what}/{self._rank}", json.dumps(said))
        return [json.loads(self._store.get(f"{what}/{rank}")) for rank in range(self._world)]

    def _moves(self, wants: Sequence[Sequence[Any]]) -> dict[tuple[int, int], list[_Move]]:
        """(from, to) → what goes, the same on every rank."""
        moves: dict[tuple[int, int], list[_Move]] = defaultdict(list)
        for rank, boxes in enumerate(wants):
            for target, (name, full, dtype, start, shape) in enumerate(boxes):
                if not prod(shape):
                    continue
                if self._kinds.get(name) != [full, dtype]:
                    raise Incomplete(f"nobody holds {name}")
                cover = _cover(self._held[name], (tuple(start), tuple(shape)), rank, self._world)
                if cover is None:
                    raise Incomplete(f"nobody holds all of {name}")
                for owner, source, part in cover:
                    moves[owner, rank].append(_Move(source, target, part))
        return moves

    def _play(self, moves: Mapping[tuple[int, int], Sequence[_Move]], boxes: Sequence[Box]) -> None:
        pending: list[Any] = []
        arriving: list[tuple[Tensor, Sequence[_Move]]] = []
        kept: list[Tensor] = []
        with torch.no_grad():
            for (source, target), parcel in sorted(moves.items()):
                if target == self._rank and source != self._rank:
                    nbytes = sum(prod(m.part[1]) * boxes[m.target].tensor.element_size() for m in parcel)
                    buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                    pending.append(dist.irecv(buffer, source))
                    arriving.append((buffer, parcel))
            for (source, target), parcel in sorted(moves.items()):
                if source != self._rank:
                    continue
                parts = [_cut(self._boxes[move.source], move.part) for move in parcel]
                if target == self._rank:
                    for part, move in zip(parts, parcel, strict=True):
                        _cut(boxes[move.target], move.part).copy_(part)
                    continue
                kept.append(torch.cat([_bytes(part.to(self._device)) for part in parts]))
                pending.append(dist.isend(kept[-1], target))
            for work in pending:
                work.wait()
            for buffer, parcel in arriving:
                at = 0
                for move in parcel:
                    part = _cut(boxes[move.target], move.part)
                    size = part.numel() * part.element_size()
                    # A copy begins where memory is aligned for any dtype.
                    part.copy_(buffer[at : at + size].clone().view(part.dtype).view(part.shape))
                    at += size


def _described(box: Box) -> list[Any]:
    return [
        box.name,
        list(box.full_shape),
        str(box.tensor.dtype),
        list(box.start),
        list(box.tensor.shape),
    ]


def _shared(first: Extent, other: Extent) -> Extent | None:
    """The elements that two boxes share."""
    start = tuple(map(max, first[0], other[0]))
    stops = [min(a + n, b + m) for a, n, b, m in zip(*first, *other, strict=True)]
    shape = tuple(stop - begin for stop, begin in zip(stops, start, strict=True))
    return (start, shape) if all(size > 0 for size in shape) else None


def _cut(box: Box, part: Extent) -> Tensor:
    """A part of a box, by its place in the whole tensor."""
    x = box.tensor.detach()
    for dim, (at, begin, size) in enumerate(zip(part[0], box.start, part[1], strict=True)):
        x = x.narrow(dim, at - begin, size)
    return x


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _covered(holdings: Sequence[Sequence[Any]]) -> int:
    """The newest step of which all is held that any rank holds of any; if there is none, the newest at all."""
    names: dict[str, list[int]] = {box[0]: box[1] for lines in holdings for line in lines for box in line[3]}
    steps = sorted({step for lines in holdings for step, *_ in lines}, reverse=True)
    for step in steps:
        held, _ = _index(holdings, step)
        if all(
            _cover(held[name], ((0,) * len(full), tuple(full))) is not None for name, full in names.items()
        ):
            return step
    return steps[0] if steps else -1


def _index(holdings: Sequence[Sequence[Any]], step: int) -> tuple[Held, dict[str, list[Any]]]:
    """What is held after a step, and shape and dtype of each whole tensor."""
    held: Held = defaultdict(list)
    kinds: dict[str, list[Any]] = {}
    for owner, lines in enumerate(holdings):
        for boxes in [line[3] for line in lines if line[0] == step]:
            for number, (name, full, dtype, start, shape) in enumerate(boxes):
                held[name].append((owner, number, (tuple(start), tuple(shape))))
                kinds[name] = [full, dtype]
    return held, kinds


def _cover(
    held: Sequence[tuple[int, int, Extent]], wanted: Extent, rank: int = 0, world: int = 1
) -> list[tuple[int, int, Extent]] | None:
    """Disjoint parts of what is held that make up a box; a rank's own come first, then the next rank's. None where some
    is missing."""
    cover: list[tuple[int, int, Extent]] = []
    missing = prod(wanted[1])
    for owner, number, extent in sorted(held, key=lambda box: ((box[0] - rank) % world, box[0], box[1])):
        part = _shared(wanted, extent)
        if not missing or part is None or any(overlap(part, other) for _, _, other in cover):
            continue
        cover.append((owner, number, part))
        missing -= prod(part[1])
    return None if missing else cover
